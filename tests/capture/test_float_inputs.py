"""Python floats that a step changes, in ops that take no tensor for them: each call has its own, as in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync_fx.capture import patches
from gradsync_fx.errors import CaptureError
from tests.drive import quick


K = 2
OPS: dict[str, Callable[[Tensor, Any], Tensor]] = {
    "factor": lambda h, v: h * v,
    "term": lambda h, v: h + v,
    "lerp": lambda h, v: torch.lerp(h, 2 * h, v),
    "clamp": lambda h, v: h.clamp(-v, v),
    "alpha": lambda h, v: torch.add(h, h.tanh(), alpha=v),
    "slope": lambda h, v: F.leaky_relu(h, v),
    "filled": lambda h, v: h + torch.full((4,), v),
    "a tensor, too": lambda h, v: (h * v).clamp(max=v) + v,
    "exponent": lambda h, v: h.abs() ** v,
    "rounded": lambda h, v: h * round(v, 1),
    "remainder": lambda h, v: h * (1.0 + 3 * v % 0.4),
}


CHANGES: dict[str, Callable[[Any], Any]] = {
    "sum": lambda v: v + 0.05,
    "product": lambda v: v * 0.9,
    "quotient": lambda v: v / 1.1,
    "ramp": lambda v: min(0.3, v + 0.05),
    "power": lambda v: v**1.1,
}


class Annealed:
    """A step with a number that it changes."""

    def __init__(
        self, op: Callable[[Tensor, Any], Tensor], change: Callable[[Any], Any] = CHANGES["sum"]
    ) -> None:
        self.change = change
        torch.manual_seed(0)
        self.model, self.value = nn.Linear(8, 4), 0.15
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.3)
        self.op = op

    def __call__(self, x: Tensor) -> Tensor:
        loss = self.op(self.model(x), self.value).pow(2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.value = self.change(self.value)
        return loss


def batches(calls: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(1)
    return [torch.randn(3, 8, generator=source) for _ in range(calls)]


def eagerly(one: Annealed, calls: int) -> list[float]:
    losses = []
    for number, x in enumerate(batches(calls), 1):
        loss = one.op(one.model(x), one.value).pow(2).mean()
        (loss / K).backward()
        one.value = one.change(one.value)
        losses.append(loss.item())
        if number % K == 0:
            one.optimizer.step()
            one.optimizer.zero_grad()
    return losses


def check(ours: Annealed, losses: list[float], op: Callable[[Tensor, Any], Tensor]) -> None:
    plain = Annealed(op, ours.change)
    torch.testing.assert_close(losses, eagerly(plain, len(losses)), atol=1e-6, rtol=1e-5)
    for p, q in zip(ours.model.parameters(), plain.model.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=1e-5)
    assert ours.value == plain.value


@pytest.mark.captured
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_each_call_has_its_own_number(op: Callable[[Tensor, Any], Tensor]) -> None:
    ours = Annealed(op)
    step = quick(ours, K)
    check(ours, [float(step(x)) for x in batches(6)], op)


@pytest.mark.captured
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_number_that_tensors_meet_is_traced_twice_at_most(change: Callable[[Any], Any]) -> None:
    """As it is when it is first seen, and as one that changes."""
    ours = Annealed(OPS["factor"], change)
    step = quick(ours, K)
    check(ours, [float(step(x)) for x in batches(8)], OPS["factor"])
    assert step.compile_count <= 4


@pytest.mark.captured
@pytest.mark.inductor
@pytest.mark.parametrize("name", ["factor", "lerp", "clamp"])
def test_with_inductor(name: str) -> None:
    ours = Annealed(OPS[name], CHANGES["product"])
    step = quick(ours, K, backend="inductor")
    check(ours, [float(step(x)) for x in batches(4)], OPS[name])


@pytest.mark.captured
def test_too_many_captures_are_named_and_a_tensor_is_the_way_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patches, "CAPTURES", 3)
    ours = Annealed(OPS["lerp"])
    step = quick(ours, K)
    with pytest.raises(CaptureError, match="the captures of"):
        list(map(step, batches(20)))
    kept = Annealed(OPS["lerp"])
    kept.value = torch.tensor(0.15)  # type: ignore[assignment]
    step = quick(kept, K)
    losses = [float(step(x)) for x in batches(20)]
    assert step.compile_count == 2
    check(kept, losses, OPS["lerp"])


@pytest.mark.captured
def test_too_many_captures_and_on_without_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the middle of a window, too: what was summed is kept."""
    monkeypatch.setattr(patches, "CAPTURES", 3)
    ours = Annealed(OPS["lerp"])
    step = quick(ours, K, on_unsupported="eager")
    with pytest.warns(match="the step runs eagerly"):
        losses = [float(step(x)) for x in batches(20)]
    check(ours, losses, OPS["lerp"])


@pytest.mark.captured
@pytest.mark.parametrize("op", OPS.values(), ids=OPS)
def test_a_number_that_is_given_is_that_of_the_call(op: Callable[[Tensor, Any], Tensor]) -> None:
    model = Annealed(op).model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def given(x: Tensor, value: float) -> Tensor:
        loss = op(model(x), value).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = quick(given, K)
    for number, x in enumerate(batches(5)):
        value = 0.1 + 0.07 * number
        wanted = op(model(x), value).pow(2).mean()
        torch.testing.assert_close(step(x, value), wanted.detach())
