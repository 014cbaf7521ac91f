"""micro_batch_weight and skip_nonfinite on one rank, and what is refused of them."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import Lin, mlp
from tests.reference import mse, regression
from tests.refusals import refused
from tests.scripts import play
from tests.truth import Rules, Script, Slot, same


@pytest.mark.parametrize("step", ["weighed", "weighed_by_tensor"])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_a_mean_over_samples(step: str, backend: str) -> None:
    script: Script = [Slot(n, rows) for n, rows in enumerate([1, 5, 3, 2, 2, 7, 4], 1)]
    more = {"step": step, "optimizer": "adamw", "options": {"backend": backend}}
    found = play(0, [script], Rules(3, "weighted"), more)
    same(found["ours"], found["truth"], 1e-5)
    assert found["steps"] == 3


def lin() -> Any:
    """d loss / d w = x, exactly."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, weight: Any) -> Tensor:
        gradsync_fx.micro_batch_weight(weight)
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize(
    "form", [int, float, torch.tensor, lambda n: torch.tensor([n], dtype=torch.int32)]
)
def test_weights_of_every_form_are_exact(form: Any) -> None:
    """(3 * 1 + 7 * 3) / (1 + 3) = 6."""
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(lin(), 2, reduction="weighted")
    for x, weight in ((3.0, 1), (7.0, 3)):
        step(model, optimizer, torch.tensor(x), form(weight))
    assert model.w.item() == -6.0


def test_weights_as_numbers_do_not_compile_for_ever() -> None:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(lin(), 2, reduction="weighted")
    counts = []
    for n in range(12):
        step(model, optimizer, torch.tensor(1.0), 3 + n)
        counts.append(step.compile_count)
    assert counts[4:] == counts[-1:] * 8


@pytest.mark.parametrize("k", [1, 2])
def test_a_window_of_zero_weight(k: int) -> None:
    """No update, no NaN, a warning; the next window is as if it had not been."""
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(lin(), k, reduction="weighted")
    for _ in range(k - 1):
        step(model, optimizer, torch.tensor(2.0), torch.tensor(0.0))
    with pytest.warns(gradsync_fx.GradSyncWarning, match="zero weight"):
        step(model, optimizer, torch.tensor(2.0), torch.tensor(0.0))
    assert (model.w.item(), step.sync_gradients, step.optimizer_step, step.pending) == (
        0,
        False,
        0,
        0,
    )
    for _ in range(k):
        step(model, optimizer, torch.tensor(2.0), torch.tensor(4.0))
    assert (model.w.item(), step.sync_gradients, step.optimizer_step) == (-2.0, True, 1)


def test_a_forgotten_weight() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = regression(1, 1)[0]
    step = quick(plain_step, 2, reduction="weighted")
    refused(gradsync_fx.CaptureError, "weighted", step, model, optimizer, *batch)


@pytest.mark.parametrize(
    "wrong", ["twice", "rows", pytest.param("gradient", marks=pytest.mark.captured)]
)
def test_weights_that_are_refused(wrong: str) -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        if wrong == "twice":
            gradsync_fx.micro_batch_weight(1)
            gradsync_fx.micro_batch_weight(1)
        elif wrong == "rows":
            gradsync_fx.micro_batch_weight(x[:, 0])
        else:
            gradsync_fx.micro_batch_weight(next(model.parameters()).grad.sum())
        optimizer.step()
        return loss

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (batch,) = regression(1, 1)[0]
    run = quick(step, 2, reduction="weighted")
    error = refused(gradsync_fx.CaptureError, "test_weights.py", run, model, optimizer, *batch)
    assert "weight" in error.culprit


def test_a_weight_without_a_weighted_mean_is_told() -> None:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(lin(), 1)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="no effect"):
        step(model, optimizer, torch.tensor(2.0), torch.tensor(4.0))
    assert model.w.item() == -2.0


def test_a_step_with_a_weight_runs_in_eager() -> None:
    model = Lin()
    lin()(model, torch.optim.SGD(model.parameters(), lr=1.0), torch.tensor(2.0), 7)
    assert model.w.item() == -2.0


@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_micro_steps_that_are_not_finite(reduction: str, backend: str) -> None:
    bad = [False, True, False, True, True, True, False]
    script: Script = [Slot(n, 2 + n % 3, bad=b) for n, b in enumerate(bad, 1)]
    more = {
        "step": "weighed" if reduction == "weighted" else "plain",
        "options": {"backend": backend},
    }
    found = play(0, [script], Rules(3, reduction, skip_nonfinite=True), more)
    same(found["ours"], found["truth"], 1e-6)
    assert found["steps"] == 2
    assert len(found["warnings"]) == 1


def test_a_loss_that_is_infinite_while_its_gradients_are_not() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, shift: Tensor) -> Tensor:
        loss = model(x) + shift
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = quick(step, 2, skip_nonfinite=True)
    run(model, optimizer, torch.tensor(3.0), torch.tensor(math.inf))
    run(model, optimizer, torch.tensor(5.0), torch.tensor(0.0))
    assert model.w.item() == -5.0


@pytest.mark.captured
def test_by_default_nothing_is_skipped() -> None:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    run = quick(lin(), 1, reduction="weighted")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer, torch.tensor(math.nan), torch.tensor(1.0))
        run(model, optimizer, torch.tensor(math.nan), torch.tensor(1.0))
    assert math.isnan(model.w.item())
