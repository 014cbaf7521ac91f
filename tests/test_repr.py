"""What a step says of itself in a debugger: its name, k, how it runs, and where its window stands."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from tests.drive import plain_step, untraceable_step
from tests.models import mlp
from tests.reference import regression


pytestmark = pytest.mark.captured


def test_a_captured_step() -> None:
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, backend="eager")
    said = "<OptimizedStep plain_step: k=2, not captured yet, 0 micro-steps pending, 0 updates>"
    assert repr(step) == said
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in regression(1, 3)[0]:
        step(model, optimizer, *batch)
    said = "<OptimizedStep plain_step: k=2, captured, 1 micro-step pending, 1 update>"
    assert repr(step) == said
    step.discard()


def test_an_eager_step_says_why() -> None:
    step = gradsync_fx.optimize(untraceable_step, on_unsupported="eager", backend="eager")
    model = mlp()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(model, torch.optim.SGD(model.parameters(), lr=0.1), *regression(1, 1)[0][0])
    said = repr(step)
    assert said.startswith("<OptimizedStep untraceable_step: k=1, runs eagerly, as it cannot be ")
    assert "drive.py:" in said
    assert said.endswith("0 micro-steps pending, 1 update>")


def test_a_window_for_each_optimizer() -> None:
    one, other = (torch.optim.SGD(mlp().parameters(), lr=0.1) for _ in range(2))
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps={one: 2, other: 3})
    assert "k=2 for SGD, 3 for SGD, not captured yet" in repr(step)


def test_a_method_and_a_subclass() -> None:
    class Trainer:
        @gradsync_fx.optimize(gradient_accumulation_steps="manual")
        def train_step(self, x: Tensor) -> None: ...

    class Mine(gradsync_fx.OptimizedStep[..., Any]):
        pass

    assert "Trainer.train_step: k=manual" in repr(Trainer().train_step)
    mine = Mine(plain_step, gradsync_fx.options.Options())
    assert repr(mine).startswith("<Mine plain_step: k=1")


def test_what_the_backend_compiles_without_a_step() -> None:
    model = nn.Linear(2, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda x: model(x), backend="gradsync")
        compiled(torch.ones(1, 2))
    assert "no training step: by Inductor" in repr(compiled)
