"""A traced update as calls of few bodies: found where parameters are independent and alike, and never where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from gradsync_fx.optim.trace import trace_update
from gradsync_fx.optim.update import Update
from tests.drive import drive, plain_step, quick
from tests.models import mlp
from tests.reference import accumulation, assert_same, regression, twins


class ByPosition(Optimizer):
    """Later parameters move less."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for i, p in enumerate(group["params"]):
                p.add_(p.grad, alpha=-self.rate(group, i))

    def rate(self, group: dict[str, Any], i: int) -> float:
        return float(group["lr"]) * 0.5**i


class ByNumber(ByPosition):
    """The more parameters, the less they move."""

    def rate(self, group: dict[str, Any], i: int) -> Any:
        return group["lr"] / len(group["params"])


class Joint(ByPosition):
    """Moves by a step of length `lr` over all parameters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            total = sum(p.grad.square().sum() for p in group["params"]).sqrt()  # type: ignore[union-attr]
            for p in group["params"]:
                p.add_(p.grad / total * -group["lr"])


def deep() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))


def update_of(optimizer: Optimizer) -> Update:
    which = range(sum(len(group["params"]) for group in optimizer.param_groups))
    return trace_update(optimizer, tuple(which), {}, {})


def test_one_body_for_all_shapes_and_groups() -> None:
    """Two rates are two numbers of the same arithmetic."""
    layers = list(deep())  # type: ignore[call-overload]
    groups = [
        {"params": [p for layer in layers[:2] for p in layer.parameters()], "lr": 0.1},
        {"params": [p for layer in layers[2:] for p in layer.parameters()], "lr": 0.2},
    ]
    update = update_of(torch.optim.SGD(groups))
    assert len({call.body for call in update.calls}) == 1
    assert update.calls[0].body.pointwise
    assert [call.params for call in update.calls] == [(i,) for i in range(8)]
    assert [call.scalars for call in update.calls] == [update.calls[0].scalars] * 4 + [
        update.calls[4].scalars
    ] * 4
    assert update.calls[0].scalars != update.calls[4].scalars


def test_an_update_by_shape_is_no_pointwise_body() -> None:
    update = update_of(torch.optim.Adafactor(deep().parameters()))
    assert len(update.calls) == 8
    assert not any(call.body.pointwise for call in update.calls)


@pytest.mark.parametrize("make", [ByNumber, Joint])
def test_parameters_that_are_not_independent_are_traced_together(
    make: Callable[..., Optimizer],
) -> None:
    (call,) = update_of(make(deep().parameters())).calls
    assert not call.body.pointwise


@pytest.mark.parametrize("make", [ByPosition, ByNumber, Joint, torch.optim.AdamW])
def test_they_compute_what_eager_computes(make: Callable[..., Optimizer]) -> None:
    torch.manual_seed(0)
    ours, eager = twins(deep())
    data = regression(3, 2)
    mine = drive(quick(plain_step, 2), ours, make(ours.parameters(), lr=0.01), data)
    theirs = accumulation(eager, make(eager.parameters(), lr=0.01), data)
    assert_same(mine, theirs, atol=1e-6)


def test_the_program_calls_one_submodule_for_every_parameter() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = quick(plain_step, 2)
    step.prepare(model, optimizer, *regression(1, 1)[0][0])
    boundary = step.programs["boundary"]
    calls = boundary.graph.find_nodes(op="call_module", target="adamw_0")
    assert len(calls) == len(list(model.parameters()))
    assert not step.programs["accumulate"].graph.find_nodes(op="call_module", target="adamw_0")
