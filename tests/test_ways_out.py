"""The table of tests/ways_out.py: every way out that an error names is in it, with a test that is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import gradsync_fx
from tests.ways_out import WAYS_OUT, Untried


ROOT = Path(gradsync_fx.__file__).parent


def ways_out() -> Iterator[str]:
    """The keys of all `fix=` arguments in the package's code."""
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for within, call in calls(ast.parse(path.read_text(encoding="utf-8")), ""):
            for keyword in call.keywords:
                if keyword.arg == "fix":
                    yield f"{name}:{within} {beginning(keyword.value)}".strip()


def calls(node: ast.AST, within: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        inner = within
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            inner = f"{within}.{child.name}".removeprefix(".")
        if isinstance(child, ast.Call):
            yield inner, child
        yield from calls(child, inner)


def beginning(text: ast.expr) -> str:
    parts = [n.value for n in ast.walk(text) if isinstance(n, ast.Constant)]
    return "".join(p for p in parts if isinstance(p, str))[:24]


def test_every_way_out_is_in_the_table() -> None:
    found = set(ways_out())
    assert found - set(WAYS_OUT) == set(), "without a test that follows it"
    assert set(WAYS_OUT) - found == set(), "no error says this any more"


def test_the_tests_of_the_table_are_there() -> None:
    root = Path(__file__).parent.parent
    tests = {
        f"{path.relative_to(root)}::{node.name}"
        for path in Path(__file__).parent.rglob("test_*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }
    missing = {
        key: test for key, test in WAYS_OUT.items() if isinstance(test, str) and test not in tests
    }
    assert missing == {}
    assert all(entry.why for entry in WAYS_OUT.values() if isinstance(entry, Untried))
