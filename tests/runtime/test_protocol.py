"""Captured and eager steps answer the same questions, and nobody asks which of both a step is."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path
from typing import Any

import gradsync_fx
from gradsync_fx.eager.step import EagerStep
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.protocol import StepProtocol


def both(captured: CapturedStep, eager: EagerStep) -> list[StepProtocol]:
    """For the type checker, which compares every signature."""
    return [captured, eager]


def test_both_have_every_member() -> None:
    wanted = {name for name, _ in inspect.getmembers(StepProtocol) if not name.startswith("_")}
    assert {"close", "updates", "setting"} <= wanted
    source = {kind: inspect.getsource(kind) for kind in (CapturedStep, EagerStep)}
    for kind, text in source.items():
        missing = [n for n in wanted if not hasattr(kind, n) and f"self.{n}" not in text]
        assert missing == [], kind


def test_nobody_asks_for_the_kind_of_a_step() -> None:
    package = Path(gradsync_fx.__file__).parent
    asked = [
        f"{path.name}:{node.lineno}"
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and is_question(node)
    ]
    assert asked == []


def is_question(call: Any) -> bool:
    name = getattr(call.func, "id", "")
    kinds = {CapturedStep.__name__, EagerStep.__name__}
    return name == "isinstance" and any(
        getattr(node, "id", "") in kinds for node in ast.walk(call.args[1])
    )
