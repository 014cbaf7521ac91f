"""`torch.compile(..., backend="gradsync")`: found by name, the same as `optimize`, and torch untouched by it."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx._torch import dynamo, dynamo_backends, dynamo_compilers
from tests.drive import drive, plain_step, quick
from tests.models import mlp
from tests.reference import accumulation, regression
from tests.refusals import refused


def compiled(step: Any = plain_step, k: int = 2, **options: Any) -> Any:
    given = {"gradient_accumulation_steps": k, "backend": "aot_eager", **options}
    return torch.compile(step, backend="gradsync", options=given)


def fresh() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_it_is_listed_and_found_without_an_import() -> None:
    code = """
import sys, torch
assert "gradsync" in torch.compiler.list_backends()
assert "gradsync_fx" not in sys.modules
def step(model, optimizer, x):
    loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
before = model.weight.clone()
options = {"gradient_accumulation_steps": 2, "backend": "aot_eager"}
step = torch.compile(step, backend="gradsync", options=options)
step(model, optimizer, torch.ones(1, 2))
assert torch.equal(model.weight, before)
step(model, optimizer, torch.ones(1, 2))
assert torch.allclose(model.weight, before - 0.1)
print("updated")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "updated", done.stderr


def test_the_same_numbers_and_compilations_as_optimize() -> None:
    windows = regression(3, 2)
    model, optimizer = fresh()
    expected = accumulation(model, optimizer, windows)
    for make in (compiled, quick):
        model, optimizer = fresh()
        step = gradsync_fx.window(make(plain_step, 2))
        run = drive(step, model, optimizer, windows)
        assert step.compile_count == 2
        assert all(torch.equal(a, b) for a, b in zip(run.losses, expected.losses, strict=True))
        for ours, eager in zip(run.updates, expected.updates, strict=True):
            assert all(torch.equal(ours[name], eager[name]) for name in eager)


def test_torch_is_as_before() -> None:
    before = (dynamo.optimize, dict(dynamo_compilers), dynamo_backends["gradsync"])
    model, optimizer = fresh()
    first, second = compiled(k=2), compiled(k=3)
    doubled = torch.compile(lambda x: x * 2, backend="eager")
    assert (dynamo.optimize, dict(dynamo_compilers), dynamo_backends["gradsync"]) == before
    other, other_optimizer = fresh()
    data = regression(1, 3)[0]
    for i, batch in enumerate(data):
        first(model, optimizer, *batch)
        second(other, other_optimizer, *batch)
        assert torch.equal(doubled(torch.ones(2)), torch.full((2,), 2.0))
        assert (first.pending, second.pending) == ((i + 1) % 2, (i + 1) % 3)
    assert (dynamo.optimize, dict(dynamo_compilers), dynamo_backends["gradsync"]) == before


def test_loading_the_entry_point_by_hand_patches_nothing() -> None:
    """As a tool that lists plugins does, and our own `doctor`."""
    before = dynamo.optimize
    (entry,) = importlib.metadata.entry_points(group="torch_dynamo_backends", name="gradsync")
    assert entry.load().__name__ == "gradsync"
    assert dynamo.optimize is before
    first = compiled()
    assert dynamo.optimize is before
    assert isinstance(first, gradsync_fx.OptimizedStep)


def test_as_a_decorator_and_as_a_method() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.optimizer = fresh()

        @torch.compile(
            backend="gradsync", options={"gradient_accumulation_steps": 2, "backend": "aot_eager"}
        )
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            return plain_step(self.model, self.optimizer, x, y)

    one, two = Trainer(), Trainer()
    (x, y), (u, v) = regression(1, 2)[0]
    one.step(x, y)
    one.step(u, v)
    two.step(x, y)
    assert gradsync_fx.window(one.step).optimizer_step == 1
    assert gradsync_fx.window(two.step).pending == 1
    gradsync_fx.window(two.step).discard()


def test_a_model_alone_is_compiled_by_inductor_with_one_warning() -> None:
    model = nn.Linear(2, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="whole training step") as caught:
        alone = torch.compile(model, backend="gradsync")
    assert [w.filename for w in caught] == [__file__]
    assert torch.allclose(alone(torch.ones(1, 2)), model(torch.ones(1, 2)))


def test_a_function_without_a_step_is_compiled_by_inductor_with_one_warning() -> None:
    model = nn.Linear(2, 1)
    loss_of = torch.compile(lambda x: model(x).sum(), backend="gradsync")
    with pytest.warns(gradsync_fx.GradSyncWarning, match="whole training step"):
        loss = loss_of(torch.ones(1, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error", gradsync_fx.GradSyncWarning)
        loss_of(torch.zeros(1, 2))
    loss.backward()
    assert torch.equal(model.weight.grad, torch.ones(1, 2))


def test_options_are_checked_at_once() -> None:
    refused(gradsync_fx.OptionError, "argument 'steps'", lambda: compiled(steps=1))
    refused(gradsync_fx.OptionError, "option 'backend'", lambda: compiled(backend="gradsync"))


def test_disabled() -> None:
    assert torch.compile(plain_step, backend="gradsync", disable=True) is plain_step


def test_window_of_something_else() -> None:
    refused(gradsync_fx.WindowError, "window(function)", gradsync_fx.window, plain_step)
