"""The command line `gradsync-fx`: parses arguments, and sets the exit code.

`--help` needs no torch, which takes seconds to import: what the commands do stands in commands.py, imported by whoever
runs one.
"""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

import gradsync_fx
from gradsync_fx.cli.arguments import (
    EXAMPLES,
    BandwidthOption,
    BuffersOption,
    CapOption,
    DotOption,
    EachOption,
    FactoryArgument,
    FlopsOption,
    GlobalBatchOption,
    HardwareOption,
    HtmlOption,
    JsonOption,
    LatencyOption,
    LimitOption,
    MemoryOption,
    NonfiniteOption,
    ReductionOption,
    SeveralRanksOption,
    StepsOption,
    SumsOption,
    TargetOption,
    TraceOption,
    WatchedArgument,
    WatchedStepsOption,
    WindowsOption,
    WireOption,
    WorldOption,
    epilog,
)
from gradsync_fx.cli.problems import Afterwards, Problem


FACTORY = "FACTORY is a function without arguments that returns (train_step, args) or (train_step, args, kwargs)."


app = typer.Typer(
    name="gradsync-fx",
    help="Shows what gradsync_fx makes of a training step, without training; watches and converts training scripts.",
    epilog=epilog(*EXAMPLES),
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(
            f"gradsync_fx {gradsync_fx.__version__} (torch {importlib.metadata.version('torch')}, "
            f"Python {platform.python_version()})"
        )
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="show versions")
    ] = False,
) -> None:
    pass


@app.command(
    epilog=epilog("inspect"), help=f"What the rewrite changes in a step, as tables.\n\n{FACTORY}"
)
def inspect(
    factory: FactoryArgument,
    gradient_accumulation_steps: StepsOption = "1",
    world_size: WorldOption = None,
    target: TargetOption = None,
    hardware: HardwareOption = None,
    latency: LatencyOption = None,
    bandwidth: BandwidthOption = None,
    flops: FlopsOption = None,
    reduction: ReductionOption = None,
    bucket_cap_mb: CapOption = None,
    sync_each_batch: EachOption = False,
    skip_nonfinite: NonfiniteOption = False,
    broadcast_buffers: BuffersOption = None,
    accumulator_dtype: SumsOption = None,
    reduce_dtype: WireOption = None,
    html: HtmlOption = None,
    json: JsonOption = None,
    dot: DotOption = None,
    timeout: LimitOption = 600.0,
    traceback: TraceOption = False,
) -> None:
    given = dict(locals())
    with _told(traceback):
        from gradsync_fx.cli import commands

        commands.show_report(given)


@app.command(
    epilog=epilog("diff"),
    help=f"The accumulate program beside the boundary program, as Python. "
    f"What repeats is folded; --json has both programs whole.\n\n{FACTORY}",
)
def diff(
    factory: FactoryArgument,
    gradient_accumulation_steps: StepsOption = "2",
    world_size: SeveralRanksOption = 2,
    reduction: ReductionOption = None,
    bucket_cap_mb: CapOption = None,
    sync_each_batch: EachOption = False,
    skip_nonfinite: NonfiniteOption = False,
    broadcast_buffers: BuffersOption = None,
    accumulator_dtype: SumsOption = None,
    reduce_dtype: WireOption = None,
    unified: Annotated[
        bool, typer.Option("--unified", "-u", help="as a unified diff, also on a wide terminal")
    ] = False,
    json: JsonOption = None,
    timeout: LimitOption = 600.0,
    traceback: TraceOption = False,
) -> None:
    given = dict(locals())
    with _told(traceback):
        from gradsync_fx.cli import commands

        commands.show_difference(given)


@app.command(
    epilog=epilog("plan"),
    help="Which micro-batch and k fit into the memory of one rank, and what each costs.\n\n"
    f"{FACTORY} Where it has a parameter micro_batch, it is called with several.",
)
def plan(
    factory: FactoryArgument,
    memory: MemoryOption,
    global_batch: GlobalBatchOption,
    world_size: SeveralRanksOption = 1,
    hardware: HardwareOption = "laptop",
    latency: LatencyOption = None,
    bandwidth: BandwidthOption = None,
    flops: FlopsOption = None,
    accumulator_dtype: SumsOption = None,
    reduce_dtype: WireOption = None,
    json: JsonOption = None,
    timeout: LimitOption = 600.0,
    traceback: TraceOption = False,
) -> None:
    given = dict(locals())
    with _told(traceback):
        from gradsync_fx.cli import commands

        commands.show_choices(given)


@app.command(
    epilog=epilog("doctor"),
    help="Whether this machine has what gradsync_fx needs, and what to do.",
)
def doctor(json: JsonOption = None, traceback: TraceOption = False) -> None:
    with _told(traceback):
        from gradsync_fx.cli import commands

        commands.show_checks(json)


@app.command(
    "diagnose",
    epilog=epilog("diagnose"),
    help="Runs a script unchanged, and says which mistakes of gradient accumulation its first windows make.\n\n"
    "COMMAND is a script and its arguments, or, behind --, all of a command line that begins with python or torchrun; "
    "other launchers start `-m gradsync_fx.diagnose train.py`. "
    "What is found goes to stderr, of rank 0. Exceptions and the exit code are the script's, but with --stop.",
    context_settings={"allow_interspersed_args": False},
)
def watch_script(
    command: WatchedArgument,
    windows: WindowsOption = 3,
    micro_steps: WatchedStepsOption = None,
    stop: Annotated[
        bool,
        typer.Option(
            "--stop",
            help="end the script after these windows; exits with 1 where a mistake is found",
        ),
    ] = False,
    module: Annotated[
        bool,
        typer.Option("--module", "-m", help="COMMAND begins with a module's name, not a file's"),
    ] = False,
    traceback: TraceOption = False,
) -> None:
    given = dict(locals())
    with _told(traceback):
        from gradsync_fx.cli import script

        run = script.to_run(given)
    raise Afterwards(run)


@app.command(
    "convert",
    epilog=epilog("convert"),
    help="Turns loops that accumulate gradients into gradsync_fx.optimize, and shows the difference.\n\n"
    "Nothing is run. Loops of a shape that is not known stay as they are; stderr says which, and why.",
)
def rewrite_script(
    script: Annotated[
        str, typer.Argument(metavar="FILE.py", help="a training script", show_default=False)
    ],
    output: Annotated[
        str | None,
        typer.Option("--output", "-o", metavar="OUT", help="write the new script there instead"),
    ] = None,
    in_place: Annotated[
        bool, typer.Option("--in-place", help="write it over the script instead")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="let --output write over a file that exists")
    ] = False,
    traceback: TraceOption = False,
) -> None:
    with _told(traceback):
        from gradsync_fx.cli import conversions

        conversions.convert_script(script, output, in_place=in_place, force=force)


@app.command(
    epilog=epilog("cache"),
    help="What traces left on disk for later processes, beside Inductor's cache.",
)
def cache(
    clear: Annotated[bool, typer.Option("--clear", help="delete it")] = False,
    json: JsonOption = None,
    traceback: TraceOption = False,
) -> None:
    with _told(traceback):
        from gradsync_fx.cli import commands

        commands.show_cache(json, clear=clear)


@contextmanager
def _told(traceback: bool) -> Iterator[None]:
    """Problems become text on stderr and an exit code."""
    try:
        yield
    except Problem as problem:
        text = problem.text(traceback=traceback)
        Console(stderr=True).print(text, soft_wrap=True, highlight=False)
        raise typer.Exit(problem.code) from None


def main() -> None:
    """The entry point."""
    _run(*sys.argv[1:])


def diagnose_script() -> None:
    """The entry point of `python -m gradsync_fx.diagnose`, for launchers that start modules."""
    _run("diagnose", *sys.argv[1:])


def _run(*arguments: str) -> None:
    shown = sys.excepthook  # typer puts its own in its place
    try:
        app(arguments, prog_name="gradsync-fx")
    except Afterwards as after:
        run = after.run
    sys.excepthook = shown
    run()  # here no exception is met by the parser, which has texts and exit codes of its own for some
