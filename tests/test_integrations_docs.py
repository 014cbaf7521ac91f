"""The new side of every diff in docs/integrations.md runs, in the order of the page."""

from __future__ import annotations

import functools
import re
import sys
import types
import warnings
from pathlib import Path

import pytest

import gradsync_fx
from gradsync_fx.integrations import transformers as of_transformers
from tests.scenarios.accelerated import launched


PAGE = Path(__file__).resolve().parent.parent / "docs" / "integrations.md"
BLOCK = re.compile(r"^```(python|diff)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def new_side(diff: str) -> str:
    """The lines that a diff leaves or adds; those that it takes away stay as empty lines, for line numbers."""
    return "\n".join("" if line[:1] == "-" else line[1:] for line in diff.splitlines())


def test_the_page_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    quick = functools.partial(gradsync_fx.optimize, backend="aot_eager")
    monkeypatch.setattr(gradsync_fx, "optimize", quick)
    monkeypatch.setattr(of_transformers, "optimize", quick)
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("migrated")
    monkeypatch.setitem(sys.modules, "migrated", module)
    text = PAGE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) == 6
    with launched(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", gradsync_fx.GradSyncWarning)
        for block in blocks:
            source = block[2] if block[1] == "python" else new_side(block[2])
            line = text.count("\n", 0, block.start(2))
            exec(compile("\n" * line + source, str(PAGE), "exec"), module.__dict__)
