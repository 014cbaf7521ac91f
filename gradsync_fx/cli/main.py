"""The command line `gradsync-fx`: parses arguments, prints and writes what the commands return, sets the exit code."""

from __future__ import annotations

import json
import math
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import torch
import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

import gradsync_fx
from gradsync_fx.cli import doctor as checks
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
    WireOption,
    WorldOption,
    epilog,
)
from gradsync_fx.cli.diff import codes, to_sides
from gradsync_fx.cli.factory import Request, Target, Tell, make_report
from gradsync_fx.cli.outputs import STDOUT, check_outputs, save_output, show, write
from gradsync_fx.cli.plan import Wanted, as_data, make_plan, to_table
from gradsync_fx.cli.problems import REFUSED, USAGE, Problem, printable
from gradsync_fx.cli.subprocess_job import limited
from gradsync_fx.errors import OptionError, ToolchainError
from gradsync_fx.inspection.costs import PRESETS, Hardware, find_hardware
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.text import WIDTH, to_tables
from gradsync_fx.lowering.target.cards import Card, check_toolchain, find_card
from gradsync_fx.options import Options


FACTORY = "FACTORY is a function without arguments that returns (train_step, args) or (train_step, args, kwargs)."


app = typer.Typer(
    name="gradsync-fx",
    help="Shows what gradsync_fx makes of a training step: nothing is trained, no other machine is needed.",
    epilog=epilog(*EXAMPLES),
    rich_markup_mode="rich",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(
            f"gradsync_fx {gradsync_fx.__version__} (torch {torch.__version__}, "
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
        check_outputs(html=html, json=json, dot=dot)
        card = _card(target)
        preset = hardware or (card.hardware if card else "laptop")
        machine = _hardware(preset, latency=latency, bandwidth=bandwidth, flops=flops)
        report = _report(given, machine, timeout)
        if html is not None:
            save_output(html, report.to_html)
        for path, text in ((json, report.to_json), (dot, report.to_dot)):
            if path is not None:
                write(path, text())
        if STDOUT not in (json, dot):
            _show(to_tables(report))


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
        check_outputs(json=json)
        report = _report(given, find_hardware("laptop"), timeout)
        programs = codes(report)
        if len(programs) < 2:
            raise Problem(
                USAGE,
                "--gradient-accumulation-steps",
                f"{report.k}: every call is a boundary, so there is one program only",
                "two programs to compare",
                "pass 2 or more",
            )
        if json is not None:
            found = {"step": report.step, "k": report.k, "world_size": report.world_size}
            write(json, _json({**found, "programs": programs}))
        if json != STDOUT:
            console = Console()
            show(console, to_sides(report, console.width, unified=unified))


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
        check_outputs(json=json)
        wanted = Wanted.of(memory, global_batch, world_size)
        machine = _hardware(hardware or "laptop", latency=latency, bandwidth=bandwidth, flops=flops)
        request = _request({**given, "gradient_accumulation_steps": "2"}, machine)
        found = _limited(partial(make_plan, request, wanted), request, timeout)
        if json is not None:
            write(json, _json(as_data(found, wanted, request)))
        if json != STDOUT:
            _show(to_table(found, wanted, request))
        if not any(choice.fits for choice in found):
            raise typer.Exit(REFUSED)


@app.command(
    epilog=epilog("doctor"),
    help="Whether this machine has what gradsync_fx needs, and what to do.",
)
def doctor(json: JsonOption = None, traceback: TraceOption = False) -> None:
    with _told(traceback):
        check_outputs(json=json)
        err, found = Console(stderr=True), []
        styles = {checks.OK: "green", checks.WARN: "yellow", checks.FAIL: "bold red"}
        table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
        table.add_column()
        table.add_column()
        table.add_column(overflow="fold")
        with err.status("looking at this machine"):
            for check in checks.examine():
                found.append(check)
                detail = Text(printable(check.detail))
                if check.fix:
                    detail.append(f"\nwhat to do: {printable(check.fix)}", style="cyan")
                table.add_row(Text(check.status, styles[check.status]), check.name, detail)
        ok = all(check.status != checks.FAIL for check in found)
        if json is not None:
            write(json, _json({"ok": ok, "checks": [asdict(check) for check in found]}))
        if json != STDOUT:
            show(Console(), table)
        if not ok:
            raise typer.Exit(REFUSED)


def _report(given: dict[str, Any], machine: Hardware, timeout: float) -> Report:
    """The report for the arguments of a command. Raises `Problem`."""
    request = _request(given, machine)
    report: Report = _limited(partial(make_report, request), request, timeout)
    return report


def _request(given: dict[str, Any], machine: Hardware) -> Request:
    """What the arguments of a command ask for. Raises `Problem`."""
    factory = Target.of(given["factory"])
    names = (
        "reduction", "bucket_cap_mb", "sync_each_batch", "skip_nonfinite", "broadcast_buffers",
        "accumulator_dtype", "reduce_dtype",
    )  # fmt: skip
    options = {name: given[name] for name in names if given.get(name) not in (None, False)}
    steps = given["gradient_accumulation_steps"]
    options["gradient_accumulation_steps"] = int(steps) if _is_number(steps) else steps
    for name in ("accumulator_dtype", "reduce_dtype"):
        if name in options:
            options[name] = getattr(torch, options[name], options[name])
    try:
        Options.of(options)
    except OptionError as error:
        raise Problem.of(USAGE, error) from error
    return Request(factory, given["world_size"], machine, options, given.get("target"))


def _limited(job: Callable[[Tell], Any], request: Request, timeout: float) -> Any:
    """What a job on the user's file gives, done in a process of its own. Raises `Problem`."""
    if not math.isfinite(timeout):
        raise Problem(USAGE, "--timeout", f"{timeout}", "a number of seconds", "0 is for no limit")
    err = Console(stderr=True)
    with err.status(Text("starting")) as status:
        return limited(
            job,
            timeout,
            str(request.target),
            request.target.file,
            tell=lambda doing: status.update(Text(f"{printable(doing)} ...")),
            show=lambda text: err.print(Text(text), end="", soft_wrap=True),
        )


def _card(target: str | None) -> Card | None:
    """Raises `Problem` for a target that is not known, or whose compilers are missing."""
    if target is None:
        return None
    try:
        card = find_card(target)
        check_toolchain(target)
    except OptionError as error:
        raise Problem.of(USAGE, error) from error
    except ToolchainError as error:
        raise Problem.of(REFUSED, error) from error
    return card


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def _hardware(preset: str, **numbers: float | None) -> Hardware:
    """The preset, with the numbers that are given in place of its own."""
    try:
        machine = find_hardware(preset)
    except OptionError as error:
        fix = f"pass one of them, or one and --{', --'.join(numbers)}"
        raise Problem(USAGE, error.culprit, error.seen, ", ".join(PRESETS), fix) from error
    changed = {name: value for name, value in numbers.items() if value is not None}
    for name, value in changed.items():
        least = 0.0 if name == "latency" else math.ulp(0.0)
        if not least <= value < math.inf:
            wanted = "a number of at least 0" if name == "latency" else "a number above 0"
            raise Problem(USAGE, f"--{name}", f"{value}", wanted, "pass one, or leave it out")
    return replace(machine, name=f"{preset}, changed", **changed) if changed else machine


def _show(tables: RenderableType) -> None:
    """Piped, as wide as print(report); on a terminal as wide as that."""
    console = Console()
    show(console if console.is_terminal else Console(width=WIDTH), tables)


def _json(found: dict[str, Any]) -> str:
    return json.dumps({"version": 1, **found}, indent=1)


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
    app(prog_name="gradsync-fx")
