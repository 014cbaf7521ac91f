"""Outputs of commands, files and stdout: checked before the work is done; what cannot be written is a `Problem`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from gradsync_fx.cli.problems import UNWRITABLE, USAGE, Problem, printable


STDOUT = "-"
_SPELLED = "backslashreplace"  # file names may hold what no encoding has


def check_outputs(**outputs: str | None) -> None:
    """Before the work is done: whether its result has somewhere to go. Raises `Problem`."""
    if outputs.get("html") == STDOUT:
        raise Problem(USAGE, "--html -", "a page is not for a terminal", "a file's name")
    if list(outputs.values()).count(STDOUT) > 1:
        raise Problem(USAGE, "-", "two outputs to stdout", "one at most", "name files")
    for name, given in outputs.items():
        if given is None or given == STDOUT:
            continue
        try:
            seen = _obstacle(Path(given))
        except OSError as error:  # a name that is too long, say
            seen = error.strerror or str(error)
        if seen:
            fix = "name a file in a folder that exists"
            raise Problem(UNWRITABLE, f"--{name} {given}", seen, fix=fix)


def _obstacle(path: Path) -> str:
    """What keeps a file from being written there; "" where nothing is known to."""
    if path.is_dir():
        return "is a folder"
    if not path.parent.is_dir():
        return f"there is no folder {path.parent}"
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        return "no permission to write there"
    return ""


def write(path: str, text: str) -> None:
    """Into a file, or to stdout for `-`. Raises `Problem`."""
    if path == STDOUT:
        out(text if text.endswith("\n") else text + "\n")
    else:
        save_output(path, lambda p: Path(p).write_bytes(text.encode("utf-8", _SPELLED)))


def save_output(path: str, writer: Callable[[str], Any]) -> None:
    """Has it written by `writer`, and says so on stderr. Raises `Problem`."""
    try:
        writer(path)
    except OSError as error:
        fix = "name another file"
        raise Problem(UNWRITABLE, path, error.strerror or str(error), fix=fix) from error
    Console(stderr=True).print(Text(f"wrote {printable(path)}"), soft_wrap=True)


def show(console: Console, what: Any) -> None:
    """Prints to the console's stdout. Raises `Problem`."""
    with _stdout(), console.capture() as captured:
        console.print(what)
    out(re.sub(r" +$", "", captured.get(), flags=re.MULTILINE))  # tables are filled up to the width


def out(text: str) -> None:
    """Text to stdout, as it is. Raises `Problem`."""
    with _stdout():
        encoding = sys.stdout.encoding or "utf-8"
        sys.stdout.write(text.encode(encoding, _SPELLED).decode(encoding))
        sys.stdout.flush()


@contextmanager
def _stdout() -> Iterator[None]:
    try:
        yield
    except BrokenPipeError:
        _drop_stdout()
        raise typer.Exit from None  # `| head` has seen enough
    except OSError as error:
        _drop_stdout()
        fix = "make room, or send it elsewhere"
        raise Problem(UNWRITABLE, "stdout", error.strerror or str(error), fix=fix) from error


def _drop_stdout() -> None:
    """What is still buffered goes nowhere: Python would complain of it once more at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
