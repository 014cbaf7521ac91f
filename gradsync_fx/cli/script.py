"""`gradsync-fx diagnose`: runs the user's script as `__main__` in this process, and tells what its training does.

The script finds sys.argv and sys.path as `python script.py` makes them; what it raises and how it exits is its own, and
its traceback begins with its own lines. Of torchrun's command line only what the ranks run is changed.
"""

from __future__ import annotations

import os
import re
import runpy
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.text import Text
from torch.distributed import run as torchrun

from gradsync_fx.cli.problems import REFUSED, USAGE, Problem, printable
from gradsync_fx.script_watch import ScriptSeen, first_windows
from gradsync_fx.wording import number_of


WANTED = "a script, or a command line that begins with python or torchrun"
NOTHING = (
    "no training was seen: no backward in this process reached a parameter that an optimizer trains. Processes that "
    "the script starts itself are not watched (start ranks with torchrun), nor are steps of gradsync_fx.optimize"
)


@dataclass(frozen=True, slots=True)
class ScriptRun:
    """What to run and how to watch it. what: a file, or a module's name where `module`."""

    what: str
    arguments: tuple[str, ...]
    module: bool
    windows: int
    micro_steps: int | None
    stop: bool


class Stopped(BaseException):
    """Ends the script from within, where it was told to stop after the watched windows."""


def to_run(given: dict[str, Any]) -> Callable[[], None]:
    """What the command is to do, its arguments by name. Raises `Problem`."""
    words, module = list(given["command"]), given["module"]
    name = Path(words[0]).name
    if module or Path(words[0]).is_file():
        return partial(run_script, _script(words, module, given))
    if re.fullmatch(r"python[\d.]*(\.exe)?", name):
        rest = [w for w in words[1:] if w != "-u"]
        module = rest[:1] == ["-m"]
        return partial(run_script, _script(rest[1:] if module else rest, module, given))
    if name == "torchrun":
        return partial(torchrun.main, _for_ranks(words[1:], given))
    return partial(run_script, _script(words, module, given))


def run_script(script: ScriptRun) -> None:
    """Runs it to its end, or to the end of the watch."""
    sys.argv[:] = [script.what, *script.arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if script.module else str(Path(script.what).resolve().parent)
    ok = True

    def tell(seen: ScriptSeen) -> None:
        nonlocal ok
        ok = seen.diagnosis is None or seen.diagnosis.ok or seen.rank != 0
        if seen.rank == 0:
            Console(stderr=True).print(Text(printable(_told_of(seen))), soft_wrap=True)
        if script.stop and seen.running:
            raise Stopped

    try:
        with first_windows(script.windows, script.micro_steps, tell):
            if script.module:
                runpy.run_module(script.what, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script.what, run_name="__main__")
    except Stopped:
        pass
    except BaseException:
        sys.excepthook = partial(_without_our_frames, sys.excepthook)
        raise
    if script.stop and not ok:
        sys.exit(REFUSED)


def _script(words: Sequence[str], module: bool, given: dict[str, Any]) -> ScriptRun:
    if not words or (words[0].startswith("-") and not module):
        raise Problem(
            USAGE,
            " ".join(given["command"]),
            "names no script",
            WANTED,
            "give the script first; other options of python go before -m: python -O -m gradsync_fx.diagnose train.py",
        )
    if not module and not Path(words[0]).is_file():
        seen = "is a folder" if Path(words[0]).is_dir() else "there is no such file"
        raise Problem(
            USAGE, words[0], seen, WANTED,
            f"look for it from {Path.cwd()}; other launchers take a module: accelerate launch -m gradsync_fx.diagnose",
        )  # fmt: skip
    what, *arguments = words
    watch = (given["windows"], given["micro_steps"], given["stop"])
    return ScriptRun(what, tuple(arguments), module, *watch)


def _for_ranks(words: list[str], given: dict[str, Any]) -> list[str]:
    """torchrun's arguments with this command between its own options and the script."""
    args = torchrun.get_args_parser().parse_args(words)
    if args.no_python:
        raise Problem(
            USAGE, "--no-python", "torchrun starts a program", "a script", "name a script of Python"
        )
    own = words[: len(words) - len(args.training_script_args) - 1]
    ours = ["gradsync_fx.diagnose", "--windows", str(given["windows"])]
    if given["micro_steps"] is not None:
        ours += ["--micro-steps", str(given["micro_steps"])]
    ours += ["--stop"] * given["stop"] + ["--module"] * args.module
    own += [] if args.module else ["-m"]
    return [*own, *ours, args.training_script, *args.training_script_args]


def _told_of(seen: ScriptSeen) -> str:
    if seen.diagnosis is None:
        if not seen.micro_steps:
            return f"gradsync-fx diagnose: {NOTHING}"
        seen_so_far = number_of(seen.micro_steps, "micro-step")
        return f"gradsync-fx diagnose: the script failed after {seen_so_far}, before an update was seen"
    lines = ["gradsync-fx diagnose", str(seen.diagnosis)]
    if seen.guessed and any(w.updated for w in seen.diagnosis.windows):
        meant = seen.diagnosis.micro_steps
        lines.append(
            f"micro_steps={meant} is what was seen most; --micro-steps K says what is meant"
        )
    return "\n".join(lines)


def _without_our_frames(
    shown: Callable[..., Any],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    """An excepthook: the frames below `runpy`, which are the user's; none, where the script cannot be compiled."""
    while trace is not None and trace.tb_frame.f_code is not run_script.__code__:
        trace = trace.tb_next
    while trace is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    shown(kind, error.with_traceback(trace), trace)


# Functions of runpy have the name that it was frozen under, or its file's.
_OURS = {__file__, runpy.run_path.__code__.co_filename, runpy.__file__}
