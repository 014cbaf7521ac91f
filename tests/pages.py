"""The blocks of README.md and of docs/, run as they stand.

    ```python   in one namespace per page, which goes on from the README's ten lines
    ```diff     the new side, likewise
    ```sh       line by line, in a folder that has the examples
    ```text     right after one of these: what it printed, where a line `...` stands for any number of lines
    ```{name}   a directive of the site's: tests/test_site.py builds it

`<!-- not run: why -->` right before a block leaves it out.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import subprocess
import sys
import types
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
PAGES = (README, *sorted((ROOT / "docs").glob("*.md")))
RUN = ("python", "diff", "sh")
WIDTH = 100  # columns of the terminal that shell lines run in
_FENCE = re.compile(
    r"(?:^<!-- not run:(?P<why>.*?)-->\n)?^```(?P<kind>\S*)\n(?P<text>.*?)^```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. line: of its first line in the page. why: the reason not to run it. prints: None for any."""

    page: Path
    line: int
    kind: str
    text: str
    why: str | None
    prints: str | None = None

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"


def blocks(page: Path, text: str) -> list[Block]:
    """All blocks of a page; a block of text right after one that runs is what that one prints."""
    found: list[Block] = []
    end = -1
    for fence in _FENCE.finditer(text):
        why = fence["why"].strip() if fence["why"] is not None else None
        line = text.count("\n", 0, fence.start("text")) + 1
        block = Block(page, line, fence["kind"], fence["text"], why)
        follows = not text[end : fence.start()].strip() if end >= 0 else False
        if block.kind == "text" and why is None and follows and found[-1].kind in RUN:
            last = found.pop()
            block = Block(page, last.line, last.kind, last.text, last.why, block.text)
        found.append(block)
        end = fence.end()
    return found


def ten_lines() -> str:
    """The README's first block of Python, which the other pages go on from."""
    return next(b.text for b in blocks(README, README.read_text()) if b.kind == "python")


def play(page: Path, text: str, folder: Path) -> Iterator[tuple[Block, str]]:
    """Runs a page's blocks in their order, each with what it printed. folder: to run in."""
    module = types.ModuleType("page")
    sys.modules["page"] = module
    if page != README:
        exec(compile(ten_lines(), str(README), "exec"), module.__dict__)
    for block in blocks(page, text):
        if block.why is not None or block.kind not in RUN:
            continue
        if block.kind == "sh":
            yield block, "".join(_shell(line, folder) for line in block.text.splitlines())
            continue
        source = new_side(block.text) if block.kind == "diff" else block.text
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.chdir(folder):
            exec(compile("\n" * (block.line - 1) + source, str(page), "exec"), module.__dict__)
        yield block, printed.getvalue()


def new_side(diff: str) -> str:
    """The lines that a diff leaves or adds; those that it takes away stay as empty lines, for line numbers."""
    return "\n".join("" if line[:1] == "-" else line[1:] for line in diff.splitlines())


def printed_as_said(printed: str, said: str) -> bool:
    """Whether a text is what a page says, where a line of `...` stands for any lines, and (...) for anything."""
    wanted = re.escape(said).replace(r"\(\.\.\.\)", r"\(.*?\)")
    wanted = re.sub(r"(?m)^\\\.\\\.\\\.\\?\n", "(?:.*\n)*?", wanted)
    return re.fullmatch(wanted, printed) is not None


def _shell(line: str, folder: Path) -> str:
    """One line of a shell: a command of ours, or an example."""
    words = shlex.split(line, comments=True)
    commands = {"gradsync-fx": ["-m", "gradsync_fx"], "python": []}
    if not words or words[0] not in commands:
        raise ValueError(f"{line!r}: no command that the tests run")
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    ended = subprocess.run(
        [sys.executable, *commands[words[0]], *words[1:]],
        cwd=folder,
        env={**os.environ, "COLUMNS": str(WIDTH), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert ended.returncode == 0, f"{line}\n{ended.stderr}"
    return ended.stdout
