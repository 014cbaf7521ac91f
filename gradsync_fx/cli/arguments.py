"""The arguments of the command line, each declared once, and the epilogs of `--help`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.markup import escape

from gradsync_fx.choices import BROADCASTS, REDUCTIONS
from gradsync_fx.cli.problems import MEANINGS
from gradsync_fx.inspection.costs import PRESETS
from gradsync_fx.lowering.target.cards import CARDS


EXAMPLES = {
    "inspect": (
        "gradsync-fx inspect examples/inspect_step.py:gpt -k 4 --world-size 8",
        "gradsync-fx inspect lib.training:factory -k 8 --hardware h100-400g",
        "gradsync-fx inspect train.py:factory -k 4 --target cuda:sm_90 --html report.html",
        "gradsync-fx inspect train.py:factory -k 4 --world-size 8 --html report.html",
        "gradsync-fx inspect train.py:factory -k 4 --json - | jq .bytes_after",
    ),
    "diff": (
        "gradsync-fx diff examples/inspect_step.py:gpt",
        "gradsync-fx diff train.py:factory -k 4 --world-size 8 --unified | less -R",
    ),
    "plan": (
        "gradsync-fx plan examples/inspect_step.py:gpt --memory 2GB --global-batch 64",
        "gradsync-fx plan train.py:factory --memory 24GB --global-batch 512 --world-size 8 --hardware a100-nvlink",
    ),
    "diagnose": (
        "gradsync-fx diagnose train.py",
        "gradsync-fx diagnose --windows 2 --micro-steps 4 --stop train.py",
    ),
    "convert": (
        "gradsync-fx convert train.py",
        "gradsync-fx convert train.py --output train_accumulating.py",
    ),
    "doctor": ("gradsync-fx doctor", "gradsync-fx doctor --json - | jq .ok"),
    "cache": ("gradsync-fx cache", "gradsync-fx cache --clear"),
}


def epilog(*commands: str) -> str:
    """Examples of these commands, and what the exit codes mean."""
    examples = "\n".join(escape(line) for command in commands for line in EXAMPLES[command])
    exits = "\n".join(f"{code}  {escape(meaning)}" for code, meaning in MEANINGS.items())
    return f"[bold]Examples[/bold]\n{examples}\n\n[bold]Exit codes[/bold]\n{exits}"


WINDOW, ESTIMATE, OUTPUT = "Window", "Estimate", "Output"  # panels of --help

FactoryArgument = Annotated[
    str,
    typer.Argument(metavar="FILE.py:FACTORY", help="or package.module:FACTORY", show_default=False),
]
StepsOption = Annotated[
    str,
    typer.Option(
        "--gradient-accumulation-steps",
        "-k",
        metavar="K",
        help="micro-steps in a window, or manual",
        rich_help_panel=WINDOW,
    ),
]
WorldOption = Annotated[
    int | None,
    typer.Option(
        "--world-size",
        min=1,
        metavar="N",
        help="ranks, simulated; without it those of this process",
        rich_help_panel=WINDOW,
    ),
]
SeveralRanksOption = Annotated[
    int,
    typer.Option(
        "--world-size",
        min=1,
        metavar="N",
        help="ranks, simulated; with 1 there is no all-reduce",
        rich_help_panel=WINDOW,
    ),
]
TargetOption = Annotated[
    str | None,
    typer.Option(
        "--target",
        metavar="CARD",
        help=f"code for a card that is not there: {', '.join(CARDS)}",
        autocompletion=lambda: list(CARDS),
        rich_help_panel=ESTIMATE,
    ),
]
HardwareOption = Annotated[
    str | None,
    typer.Option(
        "--hardware",
        metavar="PRESET",
        help=", ".join(PRESETS),
        show_default="laptop, or the target's",
        autocompletion=lambda: list(PRESETS),
        rich_help_panel=ESTIMATE,
    ),
]
MemoryOption = Annotated[
    str,
    typer.Option(
        "--memory", metavar="SIZE", help="of one rank: 24GB, 80GiB, or bytes", show_default=False
    ),
]
GlobalBatchOption = Annotated[
    int,
    typer.Option(
        "--global-batch",
        min=1,
        metavar="N",
        help="samples of one update, on all ranks together",
        show_default=False,
    ),
]
LatencyOption = Annotated[
    float | None,
    typer.Option(metavar="S", help="seconds of one message", rich_help_panel=ESTIMATE),
]
BandwidthOption = Annotated[
    float | None,
    typer.Option(metavar="B", help="bytes/s of one rank's link", rich_help_panel=ESTIMATE),
]
FlopsOption = Annotated[
    float | None,
    typer.Option(metavar="F", help="FLOP/s of one rank", rich_help_panel=ESTIMATE),
]
ReductionOption = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help=", ".join(REDUCTIONS),
        show_default="mean",
        autocompletion=lambda: list(REDUCTIONS),
        rich_help_panel=WINDOW,
    ),
]
CapOption = Annotated[
    float | None,
    typer.Option(
        "--bucket-cap-mb",
        metavar="MIB",
        help="of one all-reduce",
        show_default="25",
        rich_help_panel=WINDOW,
    ),
]
EachOption = Annotated[
    bool,
    typer.Option("--sync-each-batch", help="reduce in every micro-step", rich_help_panel=WINDOW),
]
NonfiniteOption = Annotated[
    bool,
    typer.Option(
        "--skip-nonfinite",
        help="leave out micro-steps that are not finite",
        rich_help_panel=WINDOW,
    ),
]
BuffersOption = Annotated[
    str | None,
    typer.Option(
        metavar="WHEN",
        help=", ".join(BROADCASTS),
        autocompletion=lambda: list(BROADCASTS),
        rich_help_panel=WINDOW,
    ),
]
SumsOption = Annotated[
    str | None,
    typer.Option(
        "--accumulator-dtype",
        metavar="DTYPE",
        help="float32, bfloat16, ...",
        rich_help_panel=WINDOW,
    ),
]
WireOption = Annotated[
    str | None,
    typer.Option(
        "--reduce-dtype", metavar="DTYPE", help="float32, bfloat16, ...", rich_help_panel=WINDOW
    ),
]
LimitOption = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0,
        metavar="S",
        help="seconds for loading, factory and capture; 0: no limit, in this process, as a debugger needs it",
    ),
]
WatchedArgument = Annotated[
    list[str],
    typer.Argument(metavar="COMMAND", help="a script and its arguments", show_default=False),
]
WindowsOption = Annotated[
    int, typer.Option("--windows", min=1, metavar="N", help="windows (updates) to watch")
]
WatchedStepsOption = Annotated[
    int | None,
    typer.Option(
        "--micro-steps",
        min=1,
        metavar="K",
        help="that the script means to put into one update",
        show_default="the most frequent number seen",
    ),
]
TraceOption = Annotated[bool, typer.Option("--traceback", help="show the traceback of an error")]
JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="OUT", help="JSON; -: to stdout, alone", rich_help_panel=OUTPUT),
]
HtmlOption = Annotated[
    str | None,
    typer.Option("--html", metavar="OUT", help="a page to look at", rich_help_panel=OUTPUT),
]
DotOption = Annotated[
    str | None,
    typer.Option(
        "--dot", metavar="OUT", help="graphviz; -: to stdout, alone", rich_help_panel=OUTPUT
    ),
]
