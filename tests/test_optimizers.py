"""Optimizers: after every window, parameters and the optimizer's own state are those of eager accumulation.

Each of `tests.optimizers`, and what a user does with one: groups with settings of their own, two in a step, a saved
state loaded, a parameter that gets no gradient.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import drive, plain_step, quick
from tests.models import matrices, mlp
from tests.optimizers import OPTIMIZERS
from tests.reference import (
    accumulation,
    assert_same,
    assert_same_parameters,
    mse,
    regression,
    twins,
)


def same_state(ours: dict[str, Any], theirs: dict[str, Any], atol: float = 2e-6) -> None:
    """Two state dicts of one optimizer class: the same keys, types, and values within `atol`."""
    assert ours["state"].keys() == theirs["state"].keys()
    assert len(ours["param_groups"]) == len(theirs["param_groups"])
    pairs = [(ours["state"][i], theirs["state"][i]) for i in theirs["state"]]
    for mine, other in [*pairs, *zip(ours["param_groups"], theirs["param_groups"], strict=True)]:
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert type(mine[key]) is type(value), key
            if isinstance(value, Tensor):
                assert mine[key].dtype is value.dtype
                torch.testing.assert_close(mine[key], value, atol=atol, rtol=1e-5)
            elif isinstance(value, float):
                assert mine[key] == pytest.approx(value, rel=1e-6)
            else:
                assert mine[key] == value, key


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """Six updates: parameters, losses, and the optimizer's own state_dict. Two programs, the first call included."""
    ours, eager = twins(mlp())
    data = regression(6, 2)
    optimizer, reference = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](eager.parameters())
    step = quick(plain_step, 2)
    mine = drive(step, ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=2e-6)
    same_state(optimizer.state_dict(), reference.state_dict())
    # With dampening, SGD's first update is other arithmetic than later ones: a program of its own.
    assert step.compile_count == (3 if name == "dampening" else 2)


def test_muon() -> None:
    """Its orthogonalisation runs in bfloat16, where another order of the sums shows early."""
    ours, eager = twins(matrices())
    data = regression(6, 2)
    optimizer = torch.optim.Muon(ours.parameters(), lr=1e-3)
    reference = torch.optim.Muon(eager.parameters(), lr=1e-3)
    step = quick(plain_step, 2)
    mine = drive(step, ours, optimizer, data)
    theirs = accumulation(eager, reference, data)
    assert_same(mine, theirs, atol=1e-4)
    moved = (theirs.updates[-1]["0.weight"] - theirs.updates[0]["0.weight"]).abs().max()
    assert moved > 1e-3
    assert step.compile_count == 2


def test_optimizer_state_appears_with_the_first_update() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = quick(plain_step, 2)
    (window,) = regression(1, 2)
    step(model, optimizer, *window[0])
    assert optimizer.state_dict()["state"] == {}
    step(model, optimizer, *window[1])
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_a_loaded_optimizer_goes_on() -> None:
    """An optimizer that has run in eager before, and one that a state dict was loaded into."""
    ours, eager = twins(mlp())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    data = regression(6, 2)
    accumulation(ours, optimizer, data[:2])
    accumulation(eager, reference, data[:2])
    step = quick(plain_step, 2)
    assert_same(
        drive(step, ours, optimizer, data[2:4]),
        accumulation(eager, reference, data[2:4]),
        atol=2e-6,
    )
    optimizer.load_state_dict(optimizer.state_dict())
    reference.load_state_dict(reference.state_dict())
    assert_same(
        drive(step, ours, optimizer, data[4:]), accumulation(eager, reference, data[4:]), atol=2e-6
    )
    assert step.compile_count == 2


def test_parameter_groups() -> None:
    """Rates, decay and momentum differ; one group has no parameter that the loss reaches."""
    ours, eager = twins(mlp())
    unused, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def make(model: nn.Module, extra: nn.Parameter) -> Optimizer:
        model.register_parameter("extra", extra)
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.05},  # type: ignore[index]
            {"params": list(model[2].parameters()), "weight_decay": 0.1},  # type: ignore[index]
            {"params": [extra]},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    data = regression(5, 2)
    optimizer, reference = make(ours, unused), make(eager, other)
    mine = drive(quick(plain_step, 2), ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-6)
    same_state(optimizer.state_dict(), reference.state_dict())
    assert torch.equal(unused, torch.ones(2))


def test_a_parameter_without_gradient_keeps_its_value() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = mlp(), nn.Linear(8, 8), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    ours, eager = twins(Half())
    data = regression(5, 2)
    step = quick(plain_step, 2)
    mine = drive(step, ours, torch.optim.AdamW(ours.parameters()), data)
    theirs = accumulation(eager, torch.optim.AdamW(eager.parameters()), data)
    assert_same(mine, theirs, atol=1e-5)
    assert all(name.startswith("used.") for name in step.gradients())


def test_two_optimizers_in_one_step() -> None:
    ours, eager = twins(mlp())
    data = regression(5, 2)

    def make(model: nn.Module) -> list[Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),  # type: ignore[index]
            torch.optim.AdamW(model[2].parameters(), lr=1e-2),  # type: ignore[index]
        ]

    def two(model: nn.Module, optimizers: list[Optimizer], x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    mine = make(ours)
    step = quick(two, 2)
    for window in data:
        for x, y in window:
            step(ours, mine, x, y)
    first, second = make(eager)
    for window in data:
        for x, y in window:
            (mse(eager, x, y) / 2).backward()
        first.step()
        second.step()
        eager.zero_grad()
    assert_same_parameters(ours, eager)
