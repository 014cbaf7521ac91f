"""What a step may touch is found by the names that its code uses as names, not by those that are attributes."""

from __future__ import annotations

import sys
from types import MethodType, ModuleType
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


class Nets:
    """Models under the names of a class."""

    first: Any
    second: Any


class Trainer:
    """Its methods use what it does not hold itself."""

    def run(self, way: str, x: Tensor) -> Any:
        return self.forth(x) if way == "forth" else self.back(x)

    def forth(self, x: Tensor) -> Any:
        return Nets.first(Nets.second(x) * 2)

    def back(self, x: Tensor) -> Any:
        return Nets.second(Nets.first(x) * 2)


class Tensors(Trainer):
    """A method that nobody uses."""

    def unused(self) -> Any:
        return weight


@pytest.mark.parametrize("held", ["class", "method", "package"])
def test_branches_meet_models_that_classes_and_packages_hold_in_any_order(
    held: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal inner names, and each branch meets another model first."""
    package: Any = ModuleType("package")
    package.nets = ModuleType("package.nets")
    package.__file__ = package.nets.__file__ = __file__

    def trained(way: Any) -> list[Tensor]:
        torch.manual_seed(0)
        Nets.first, Nets.second = nn.Linear(2, 2), nn.Linear(2, 2)
        package.nets.first, package.nets.second = Nets.first, Nets.second
        both = nn.ModuleList([Nets.first, Nets.second])
        update, trainer = sgd(both), Tensors()

        def step(branch: str, x: Tensor) -> Any:
            if held == "class":
                made = (
                    Nets.first(Nets.second(x) * 2)
                    if branch == "forth"
                    else Nets.second(Nets.first(x) * 2)
                )
            elif held == "method":
                made = trainer.run(branch, x)
            else:
                nets = package.nets
                made = (
                    package.nets.first(nets.second(x) * 2)
                    if branch == "forth"
                    else package.nets.second(nets.first(x) * 2)
                )
            loss = made.pow(2).mean()
            loss.backward()
            update.step()
            update.zero_grad()
            return loss

        run = way(step)
        for branch in ("forth", "back", "back", "forth"):
            run(branch, torch.ones(3, 2))
        return [p.detach().clone() for p in both.parameters()]

    captured = trained(lambda step: gradsync_fx.optimize(step, backend="aot_eager"))
    torch.testing.assert_close(captured, trained(lambda step: step))


def test_a_method_that_is_not_used_leads_nowhere() -> None:
    Nets.first, Nets.second = nn.Linear(2, 2), nn.Linear(2, 2)
    found = discover(Tensors().run, ("forth", torch.ones(1, 2)), {})
    assert {id(m) for _, m in found.modules} == {id(Nets.first), id(Nets.second)}


def test_the_method_that_is_the_step_leads_nowhere_by_its_class() -> None:
    """Nor does its original, where a copy of it is the step: what that is bound to is not the copy's."""
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)

    def made(inner: nn.Module) -> Any:
        def step(self: Any, x: Tensor) -> Tensor:
            self.step.called = True
            result: Tensor = inner(x)
            return result

        return step

    class Trainer:
        step = made(other)

    found = discover(MethodType(made(model), Trainer()), (torch.ones(1, 2),), {})
    assert [m for _, m in found.modules] == [model]
