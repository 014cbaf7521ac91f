"""Runs a job in a process of its own, for a limited time, so that crashes and hangs of the user's code stay there.

    job(tell) -> answer     in the child: what it prints goes to the parent's stderr, its result through a pipe
                            not done in time, or no answer at all: the child and all that it started are killed

The child is a fork (torch is imported already), outside of Linux a fresh interpreter.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gradsync_fx.cli.factory import Tell
from gradsync_fx.cli.problems import RAISED, Problem


GRACE = 1.0  # seconds between the child's own look at its stack and its end
Job = Callable[[Tell], Any]


@dataclass(frozen=True, slots=True)
class Doing:
    """What the child is at."""

    text: str


def limited(job: Job, seconds: float, culprit: str, file: str, tell: Tell, show: Tell) -> Any:
    """The job's answer. Raises `Problem`: the job's own, or that it hung or died.

    seconds: 0 for no limit and no process of its own, so that a debugger works. file: the user's, to name a line of.
    tell: gets what is being done. show: gets what the job prints.
    """
    if not seconds:
        with redirect_stdout(sys.stderr):
            return job(tell)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    context: Any = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    results, their_results = context.Pipe(duplex=False)
    printed, their_printed = context.Pipe(duplex=False)
    with TemporaryDirectory(prefix="gradsync-fx-") as folder:
        stacks = Path(folder) / "stacks"
        child = context.Process(
            target=_child, args=(job, their_results, their_printed, stacks, seconds)
        )
        child.start()
        their_results.close()
        their_printed.close()
        pump = threading.Thread(target=_pump, args=(printed, show), daemon=True)
        pump.start()
        try:
            answer = _answer(child, results, seconds, culprit, file, stacks, tell)
        finally:
            _kill(child)
            pump.join(GRACE)
    if isinstance(answer, Problem):
        raise answer
    return answer


def _answer(
    child: Any,
    results: Connection,
    seconds: float,
    culprit: str,
    file: str,
    stacks: Path,
    tell: Tell,
) -> Any:
    doing = "starting"
    end = time.monotonic() + seconds + GRACE
    while True:
        ready = wait([results, child.sentinel], timeout=max(0.0, end - time.monotonic()))
        if not ready:
            stack = stacks.read_text(errors="replace") if stacks.exists() else ""
            raise Problem(
                RAISED,
                _line_in(stack, file) or culprit,
                f"not done within {seconds:g} s, while {doing}; ended",
                fix="build less (a meta device allocates nothing), or give more time: --timeout",
                trace=stack,
            )
        try:
            answer = results.recv()
        except EOFError:
            child.join(GRACE)
            how = _ending(child.exitcode)
            fix = "run the file alone; --timeout 0 runs it in the process of gradsync-fx"
            raise Problem(RAISED, culprit, f"{how}, while {doing}", fix=fix) from None
        if not isinstance(answer, Doing):
            return answer
        doing = answer.text
        tell(doing)


def _child(
    job: Job, results: Connection, printed: Connection, stacks: Path, seconds: float
) -> None:
    if sys.platform != "win32":
        os.setsid()  # a group of its own, to be killed as one
    for number in (1, 2):
        os.dup2(printed.fileno(), number)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1, closefd=False, errors="replace")
    threading.Thread(target=_end_with_parent, daemon=True).start()
    with stacks.open("w") as file:
        # In C, without the interpreter's lock: a line is found even where Python itself is stuck.
        faulthandler.dump_traceback_later(seconds, file=file)
        try:
            answer = job(lambda text: results.send(Doing(text)))
        except Problem as problem:
            answer = problem
        faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    results.send(answer)
    os._exit(0)  # no thread and no exit hook of the user's can hold it up


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _pump(printed: Connection, show: Tell) -> None:
    while chunk := os.read(printed.fileno(), 65536):
        show(chunk.decode(errors="replace"))


def _kill(child: Any) -> None:
    try:
        if sys.platform != "win32":
            os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # over already, or not yet a group
        child.kill()
    child.join()


def _ending(code: int | None) -> str:
    if code is not None and code < 0:
        name = signal.Signals(-code).name
        return f"the process was killed by {name}" + (" (memory?)" if name == "SIGKILL" else "")
    return f"the process was ended from inside, with exit status {code}"


def _line_in(stack: str, file: str) -> str:
    """The innermost line of the user's file, from what faulthandler wrote."""
    for found in re.finditer(r'File "(.*)", line (\d+) in', stack):
        if found[1] == file:
            return f"{found[1]}:{found[2]}".removeprefix(os.getcwd() + os.sep)
    return ""
