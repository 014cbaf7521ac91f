"""A traced step that is asked runs nothing, and says what a call would run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from gradsync_fx.capture.tracer import Capture, traced
from gradsync_fx.errors import NoBackwardError
from gradsync_fx.ir.program import output_values


pytestmark = pytest.mark.captured


class Run:
    """Says what it was made for, and counts its calls."""

    def __init__(self, capture: Capture) -> None:
        self.capture, self.calls = capture, 0

    def __call__(self, inputs: list[Any]) -> list[Any]:
        self.calls += 1
        return [torch.zeros(()) for _ in output_values(self.capture.step.module)]


def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()


def test_the_answer_is_what_a_call_would_run_and_its_inputs() -> None:
    made: list[Run] = []

    def on_capture(capture: Capture) -> Run:
        made.append(Run(capture))
        return made[-1]

    step = traced(train_step, on_capture, {}, None)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(2, 3)
    before = [p.clone() for p in model.parameters()]
    run, inputs = step.find(model, optimizer, x)
    assert made == [run], "one trace"
    assert any(value is x for value in inputs)
    again, _ = step.find(model, optimizer, torch.randn(2, 3))
    assert again is run, "its guards cover the second call"
    assert run.calls == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    step(model, optimizer, x)
    assert run.calls == 1, "after a question it runs as before"


def test_what_computes_nothing_is_told_and_the_next_call_runs() -> None:
    def picky(model: nn.Module, optimizer: Any, x: torch.Tensor, *, good: bool) -> None:
        if good:
            train_step(model, optimizer, x)

    made: list[Run] = []

    def on_capture(capture: Capture) -> Run:
        made.append(Run(capture))
        return made[-1]

    step = traced(picky, on_capture, {}, None)
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(NoBackwardError):
        step.find(model, optimizer, torch.randn(2, 3), good=False)
    step(model, optimizer, torch.randn(2, 3), good=True)
    assert [run.calls for run in made] == [1]
