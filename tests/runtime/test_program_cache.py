"""A program is kept with the updates that it was compiled with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import gradsync_fx


pytestmark = pytest.mark.captured


def train_step(model: nn.Module, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def made() -> tuple[Any, nn.Module, torch.optim.SGD]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return gradsync_fx.optimize(train_step, backend="eager"), model, optimizer


def test_an_earlier_program_runs_with_its_own_updates() -> None:
    """A flag that is toggled back finds the program that it had, whatever was compiled and reported between."""
    step, model, optimizer = made()
    twin = nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    x = torch.randn(4, 3)
    for nesterov in (False, True, False, True):
        for one in (optimizer, reference):
            one.param_groups[0]["nesterov"] = nesterov
        step(model, optimizer, x)
        step.report()
        train_step(twin, reference, x)
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a, b)
    (captured,) = step._executor.catalogue.captures
    closing = frozenset({0})
    optimizer.param_groups[0]["nesterov"] = False
    first = captured.programs.compiled(closing)
    optimizer.param_groups[0]["nesterov"] = True
    second = captured.programs.compiled(closing)
    optimizer.param_groups[0]["nesterov"] = False
    assert captured.programs.compiled(closing) is first
    assert first.built.updates != second.built.updates
    assert captured.programs.plan.updates == {}, "what all programs share holds none of theirs"
