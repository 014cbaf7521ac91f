"""A step may be written in many ways: as a function of anything, a closure, a method; and may return anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import accumulation, assert_same_parameters, mse, regression, twins


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda loss, out: loss,
    "item of a tuple": lambda loss, out: (loss, out),
    "list": lambda loss, out: [out, loss],
    "dict": lambda loss, out: {"loss": loss, "nested": {"out": out}, "name": "fit", "count": 3},
    "nothing": lambda loss, out: None,
}


def assert_same_values(found: Any, wanted: Any) -> None:
    """Tensors close, all else equal, the structure the same."""
    mine, structure = pytree.tree_flatten(found)
    theirs, other = pytree.tree_flatten(wanted)
    assert structure == other
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        else:
            assert a == b
            assert type(a) is type(b)


@pytest.mark.parametrize("name", RETURNS)
def test_what_the_step_returns(name: str) -> None:
    give = RETURNS[name]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return give(loss, out)

    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    run = quick(step, 2)
    for window in regression(5, 2):
        for x, y in window:
            found = run(ours, optimizer, x, y)
            out = eager(x)
            loss = F.mse_loss(out, y)
            (loss / 2).backward()
            wanted = give(loss.detach(), out.detach())
            assert type(found) is type(wanted)
            assert_same_values(found, wanted)
        reference.step()
        reference.zero_grad()
    assert_same_parameters(ours, eager)


def check_against_eager(
    run: Callable[[Tensor, Tensor], Any], ours: nn.Module, eager: nn.Module
) -> None:
    """`run(x, y)` is a micro-step of a window of two, SGD at 0.1."""
    data = regression(5, 2)
    for window in data:
        for x, y in window:
            run(x, y)
    accumulation(eager, sgd(eager), data)
    assert_same_parameters(ours, eager)


def test_model_and_optimizer_in_a_closure() -> None:
    ours, eager = twins(mlp())
    optimizer = sgd(ours)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return plain_step(ours, optimizer, x, y)

    check_against_eager(quick(step, 2), ours, eager)


global_model: nn.Module = nn.Identity()
global_optimizer: Optimizer = torch.optim.SGD([torch.zeros(1)])


def global_step(x: Tensor, y: Tensor) -> Tensor:
    return plain_step(global_model, global_optimizer, x, y)


def test_model_and_optimizer_as_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager = twins(mlp())
    monkeypatch.setitem(globals(), "global_model", ours)
    monkeypatch.setitem(globals(), "global_optimizer", sgd(ours))
    check_against_eager(quick(global_step, 2), ours, eager)


class Trainer:
    """Holds model and optimizer; its method is the step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, sgd(model)
        self.run = quick(self.step, 2)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(self.model, x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_the_step_is_a_method() -> None:
    ours, eager = twins(mlp())
    check_against_eager(Trainer(ours).run, ours, eager)


def test_keyword_arguments() -> None:
    ours, eager = twins(mlp())
    optimizer = sgd(ours)
    step = quick(plain_step, 2)
    check_against_eager(lambda a, b: step(ours, y=b, x=a, optimizer=optimizer), ours, eager)


def test_parameters_written_by_hand() -> None:
    """Without an `Optimizer`: the step subtracts the gradient and drops it."""

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
                p.grad = None
        return loss

    ours, eager = twins(mlp())
    run = quick(step, 2)
    check_against_eager(lambda x, y: run(ours, x, y), ours, eager)
