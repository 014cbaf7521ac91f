"""Where results go: files and stdout, checked before the work is done; what cannot be written is a `Problem`."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.text import Text

from gradsync_fx.commands.problems import UNWRITABLE, USAGE, Problem, plain


STDOUT = "-"


def check_outputs(**outputs: str | None) -> None:
    """Before the work is done: whether its result has somewhere to go. Raises `Problem`."""
    if outputs.get("html") == STDOUT:
        raise Problem(USAGE, "--html -", "a page is not for a terminal", "a file's name")
    if list(outputs.values()).count(STDOUT) > 1:
        raise Problem(USAGE, "-", "two outputs to stdout", "one at most", "name files")
    for name, given in outputs.items():
        if given is None or given == STDOUT:
            continue
        path = Path(given)
        fix = "name a file in a folder that exists"
        if path.is_dir():
            raise Problem(UNWRITABLE, f"--{name} {given}", "is a folder", "a file's name", fix)
        if not path.parent.is_dir():
            seen = f"there is no folder {path.parent}"
            raise Problem(UNWRITABLE, f"--{name} {given}", seen, fix=fix)
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise Problem(UNWRITABLE, f"--{name} {given}", "no permission to write there", fix=fix)


def write(path: str, text: str) -> None:
    if path == STDOUT:
        out(text if text.endswith("\n") else text + "\n")
        return
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name another file"
        raise Problem(UNWRITABLE, path, error.strerror or str(error), fix=fix) from error
    Console(stderr=True).print(Text(f"wrote {plain(path)}"), soft_wrap=True)


def show(console: Console, what: Any) -> None:
    with console.capture() as captured:
        console.print(what)
    out(captured.get())


def out(text: str) -> None:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        # `| head` has seen enough. Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit from None
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise Problem(UNWRITABLE, "stdout", error.strerror or str(error)) from error
