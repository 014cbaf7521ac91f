"""A traced update of a class that is not torch's own is compared with its real step before it is used."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.optim import rehearsal
from gradsync_fx.optim.trace import trace_update
from tests.drive import drive, plain_step, quick
from tests.models import mlp
from tests.own_optimizers import COMPILED, Own
from tests.reference import accumulation, assert_same, regression, twins


def state_of(optimizer: Optimizer) -> dict[int, Any]:
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: dict(optimizer.state.get(p, {})) for i, p in enumerate(flat)}


def stepped(optimizer: Optimizer) -> Optimizer:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("name", COMPILED)
def test_a_trace_agrees_with_the_step_and_nothing_of_the_users_changes(name: str) -> None:
    model = mlp()
    optimizer = stepped(COMPILED[name](model))
    state = state_of(optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    update = trace_update(optimizer, tuple(range(4)), state, {})
    assert rehearsal.difference(update, state) == ""
    torch.testing.assert_close([p.detach() for p in model.parameters()], before, atol=0, rtol=0)
    assert all(p.grad is None for p in model.parameters())


class Tracing(Own):
    """Does something else when it is traced than when it runs."""

    def rate(self, i: int, p: Any, group: dict[str, Any]) -> Any:
        return group["lr"] * (1.0 if type(self) is Tracing else 0.5)


def test_a_trace_that_computes_something_else_is_not_used() -> None:
    ours, eager = twins(mlp())
    data = regression(3, 2)
    optimizer, reference = Tracing(ours.parameters()), Tracing(eager.parameters())
    with pytest.warns(gradsync_fx.GradSyncWarning, match="other parameters than its step"):
        mine = drive(quick(plain_step, 2), ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-6)


def test_without_memory_it_is_left_out_with_a_line(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rehearsal.os, "sysconf", lambda name: 1)
    model = mlp()
    with caplog.at_level(logging.INFO, "gradsync_fx"):
        quick(plain_step, 1)(model, COMPILED["place"](model), *regression(1, 1)[0][0])
    assert "no memory to compare" in caplog.text
