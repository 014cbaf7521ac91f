"""`gradsync-fx convert`: reads a script, and writes the difference to stdout or the new script to a file."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from gradsync_fx.cli.outputs import check_outputs, out, save_output
from gradsync_fx.cli.problems import REFUSED, USAGE, Problem, printable


def convert_script(script: str, output: str | None, *, in_place: bool, force: bool) -> None:
    """Says on stderr what to know of the loops, and which are left. Raises `Problem`."""
    _check_target(script, output, in_place=in_place, force=force)
    try:
        import libcst

        from gradsync_fx.conversion.convert import convert
    except ModuleNotFoundError as error:
        if error.name != "libcst":
            raise
        raise Problem(
            REFUSED,
            "libcst",
            "is not installed",
            "the library that rewrites scripts",
            "pip install 'gradsync_fx[convert]'",
        ) from error
    try:
        before = Path(script).read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        fix = "name a script of Python, in UTF-8"
        raise Problem(USAGE, script, f"cannot be read: {error}", fix=fix) from error
    try:
        found = convert(before)
    except libcst.ParserSyntaxError as error:
        raise Problem(
            USAGE,
            f"{script}:{error.raw_line}",
            f"is no Python: {error.message}",
            fix="run the script alone; it has to work without gradsync-fx",
        ) from error
    err = Console(stderr=True)
    told = [(line, f"left as it is: {why}") for line, why in found.left]
    for line, text in sorted([*told, *found.notes]):
        err.print(Text(printable(f"{script}:{line}: {text}")), soft_wrap=True)
    if not found.loops:
        if not found.left:
            err.print(Text(printable(f"{script}: no backward is found in it")), soft_wrap=True)
        raise typer.Exit(REFUSED)
    target = script if in_place else output
    if target is not None:
        save_output(target, lambda path: Path(path).write_bytes(found.text.encode()))
    else:
        out(_difference(script, before, found.text))


def _check_target(script: str, output: str | None, *, in_place: bool, force: bool) -> None:
    if not Path(script).is_file():
        seen = "is a folder" if Path(script).is_dir() else "there is no such file"
        raise Problem(USAGE, script, seen, "a script of Python", f"look for it from {Path.cwd()}")
    if output is None:
        return
    if in_place:
        raise Problem(
            USAGE, "--output", "--in-place is there, too", "one of the two", "leave one out"
        )
    check_outputs(output=output)
    if os.path.lexists(output) and not force:
        raise Problem(
            USAGE,
            f"--output {output}",
            "the file exists",
            "a name that is free",
            "name another file, or pass --force to write over it",
        )


def _difference(name: str, before: str, after: str) -> str:
    """A unified diff, as `git apply` and `patch` take it."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), name, name
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
