"""The examples in public docstrings: each public function and method has one, and it runs as it stands."""

from __future__ import annotations

import doctest
import gc
import inspect
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from tests.eagerly import asked


pytestmark = pytest.mark.captured


def functions() -> dict[str, Any]:
    """Public functions, classes and methods by name; errors, and what is a value or a dict, need no example."""
    found: dict[str, Any] = {}
    for name in gradsync_fx.__all__:
        value = getattr(gradsync_fx, name)
        if inspect.isfunction(value):
            found[name] = value
    found["OptimizedStep"] = gradsync_fx.OptimizedStep
    for name, member in vars(gradsync_fx.OptimizedStep).items():
        if inspect.isfunction(member) and not name.startswith("_"):
            found[f"OptimizedStep.{name}"] = member
    return found


# In the example of another: of `save`, of `state_dict`; and what the class's own example shows.
SHOWN_ELSEWHERE = {"OptimizedStep.load", "OptimizedStep.load_state_dict", "OptimizedStep.capture"}


def surroundings(folder: Path) -> dict[str, Any]:
    """What an example may use without saying where it comes from: a model, a step, and a little data."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def train(model: nn.Module, optimizer: Any, batches: Any) -> None:
        for i, (x, y) in enumerate(batches):
            (model(x) - y).square().mean().backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()

    x, y = torch.randn(4, 8), torch.randn(4, 1)
    return {
        "gradsync_fx": gradsync_fx,
        "torch": torch,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer),
        "train_step": train_step,
        "train": train,
        "x": x,
        "y": y,
        "batches": [(x, y)] * 3,
        "step": gradsync_fx.optimize(train_step, gradient_accumulation_steps=2, backend="eager"),
        "path": folder / "window.pt",
    }


@pytest.fixture(autouse=True)
def _ended() -> Iterator[None]:
    """Examples leave windows open."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
        gc.collect()


@pytest.mark.parametrize("name", sorted(functions()))
def test_the_example_runs(name: str, tmp_path: Path) -> None:
    assert not asked()
    value = functions()[name]
    text = inspect.getdoc(value) or ""
    examples = doctest.DocTestParser().get_doctest(text, surroundings(tmp_path), name, None, None)
    assert examples.examples or name in SHOWN_ELSEWHERE, "it has no example"
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    runner.run(examples, out=said.append, clear_globs=False)
    examples.globs.clear()
    assert runner.failures == 0, "".join(said)
