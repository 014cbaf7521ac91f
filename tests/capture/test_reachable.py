"""What a step may touch is found by the names that its code uses as names, not by those that are attributes."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.capture.reachable import discover
from tests.optimizers import sgd


# Not the step's: it has only a name in common with an attribute that the step reads.
weight = nn.Linear(1, 1)
net = nn.Linear(2, 1)
optimizer = sgd(net)


def reads_an_attribute(x: Tensor) -> Tensor:
    loss = (net(x) + net.weight.sum()).sum()
    if loss.item() > 1e9:  # no trace goes past it
        raise ValueError("far off")
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_an_attribute_is_no_global() -> None:
    found = discover(reads_an_attribute, (torch.ones(1, 2),), {})
    assert [m for _, m in found.modules] == [net]
    assert found.optimizers == [optimizer]


def test_an_unrelated_modules_gradient_stays() -> None:
    gradient = torch.ones(1, 1)
    weight.weight.grad = gradient
    step = gradsync_fx.optimize(
        reads_an_attribute, gradient_accumulation_steps=2, on_unsupported="eager", backend="eager"
    )
    with pytest.warns(gradsync_fx.GradSyncWarning, match="runs eagerly"):
        step(torch.ones(1, 2))
    step(torch.ones(1, 2))
    assert weight.weight.grad is gradient
    weight.weight.grad = None


def test_what_a_module_of_the_users_holds_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    parts: Any = ModuleType("parts")
    parts.__file__ = __file__
    parts.model, parts.other = nn.Linear(2, 1), nn.Linear(1, 1)
    monkeypatch.setitem(sys.modules, "parts", parts)
    monkeypatch.setitem(globals(), "parts", parts)

    found = discover(_of_parts, (torch.ones(1, 2),), {})
    assert [(path, m) for path, m in found.modules] == [("parts.model", parts.model)]


def _of_parts(x: Tensor) -> Tensor:
    result: Tensor = parts.model(x)  # type: ignore[name-defined]  # noqa: F821
    return result
