"""`zero_grad` of the user's own: gradients are dropped on every call, and its method runs once per update."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick, untraceable_step
from tests.models import mlp
from tests.reference import mse, regression
from tests.refusals import refused


pytestmark = pytest.mark.filterwarnings("ignore:the step runs eagerly")


class Counting(torch.optim.SGD):
    """Torch's, and a list of what it was called with."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1)
        self.calls: list[bool] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.calls.append(set_to_none)


class ByHand(Counting):
    """As in old scripts."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.detach_()
                    p.grad.zero_()
        self.calls.append(set_to_none)


class Net(nn.Sequential):
    """A model that clears a cache with its gradients, and shrinks itself."""

    def __init__(self) -> None:
        super().__init__(*mlp())
        self.calls: list[bool] = []

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        self.calls.append(set_to_none)
        with torch.no_grad():
            self[0].weight.mul_(0.9)


def by_model(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    return loss


def by_model_untraced(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    if loss.item() > -1:
        loss.backward()
    optimizer.step()
    model.zero_grad(set_to_none=False)
    return loss


def ahead(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


def plainly(
    model: nn.Module, optimizer: Optimizer, windows: Any, clear: Callable[[], object]
) -> None:
    for window in windows:
        for x, y in window:
            (F.mse_loss(model(x), y) / len(window)).backward()
        optimizer.step()
        clear()


CASES = {
    "captured": (mlp, Counting, plain_step),
    "captured, by hand": (mlp, ByHand, plain_step),
    "captured, ahead": (mlp, Counting, ahead),
    "captured, a module's": (Net, Counting, by_model),
    "eager": (mlp, Counting, untraceable_step),
    "eager, by hand": (mlp, ByHand, untraceable_step),
    "eager, a module's": (Net, Counting, by_model_untraced),
}


@pytest.mark.parametrize("name", CASES)
def test_it_runs_once_per_update(name: str) -> None:
    """Over whole windows and one that is flushed."""
    net, kind, function = CASES[name]
    windows = [*regression(2, 3), regression(1, 2)[0]]
    torch.manual_seed(1)
    model: Any = net()
    torch.manual_seed(1)
    reference: Any = net()
    optimizer, theirs = kind(model.parameters()), kind(reference.parameters())
    cleared = (lambda: reference.zero_grad(set_to_none=False)) if net is Net else theirs.zero_grad
    plainly(reference, theirs, windows, cleared)
    step = quick(function, 3, on_unsupported="eager" if "eager" in name else "error")
    counted = model if net is Net else optimizer
    for number, window in enumerate(windows):
        for x, y in window:
            assert len(counted.calls) == number
            step(model, optimizer, x, y)
            assert all(p.grad is None for p in model.parameters())
    step.flush()
    assert counted.calls == (reference if net is Net else theirs).calls
    for mine, his in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, his)


@pytest.mark.parametrize("function", [plain_step, untraceable_step])
def test_an_instance_of_its_own(function: Any) -> None:
    """A method that is set on one optimizer, as schedulers and profilers do."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    cleared = []
    torchs = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        torchs(set_to_none)
        cleared.append(set_to_none)

    optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
    step = quick(function, 2, on_unsupported="eager")
    for x, y in regression(1, 4)[0]:
        step(model, optimizer, x, y)
    assert cleared == [True, True]


class Reading(Counting):
    """Remembers a norm before it drops what it is of."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        norms = [
            p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None
        ]
        super().zero_grad(set_to_none)
        self.norms = norms


@pytest.mark.parametrize("function", [plain_step, untraceable_step])
def test_one_that_reads_gradients(function: Any) -> None:
    """Refused either way; read in the step, they are the window's."""
    model = mlp()
    optimizer = Reading(model.parameters())
    (x, y), *_ = regression(1, 1)[0]
    step = quick(function, 2, on_unsupported="eager")
    error = refused(gradsync_fx.CaptureError, "Reading.zero_grad", step, model, optimizer, x, y)
    assert "test_zeroing.py" in error.seen

    def reads(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        mse(model, x, y).backward()
        norm = model[0].weight.grad.norm()  # type: ignore[index, union-attr, operator]
        optimizer.step()
        optimizer.zero_grad()
        return norm

    model = mlp()
    run, counting = quick(reads, 2), Counting(model.parameters())
    twin = copy.deepcopy(model)
    run(model, counting, x, y)
    norm = run(model, counting, x, y)
    mse(twin, x, y).backward()
    torch.testing.assert_close(norm, twin[0].weight.grad.norm())  # type: ignore[union-attr, operator]


def test_self_check_sees_it_once_per_update() -> None:
    model = Net()
    (batch,) = regression(1, 1)[0]
    optimizer = Counting(model.parameters())
    quick(by_model, 3).self_check(model, optimizer, *batch).require()
    assert model.calls == []
