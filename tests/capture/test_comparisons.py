"""What a step does with the outcome of a comparison of numbers that are symbols of its trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gradsync_fx.errors import CaptureError
from tests.drive import quick


USES: dict[str, Callable[[Tensor, bool], Any]] = {
    "is": lambda h, b: 2 * h if b is True else h,
    "is not": lambda h, b: 2 * h if b is not False else h,
    "equals": lambda h, b: 2 * h if b == True else h,  # noqa: E712
    "in": lambda h, b: 2 * h if b in (True, 5) else h,
    "index": lambda h, b: h * [1.0, 2.0][b],
    "key": lambda h, b: h * {True: 1.0, False: 3.0}[b],
    "sum": lambda h, b: h * sum([b, True, not b, b]),
    "exclusive": lambda h, b: 2 * h if b ^ True else h,
    "factor": lambda h, b: h * b,
    "text": lambda h, b: h * len(str(b)),
}


def losses(step: Callable[[Tensor], Tensor], sizes: list[int]) -> list[float]:
    source = torch.Generator().manual_seed(1)
    return [step(torch.randn(n, 8, generator=source)).item() for n in sizes]


def _step_of(
    use: Callable[[Tensor], Any],
) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
    """One that trains at a rate of 0, and its loss."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss_of(x: Tensor) -> Tensor:
        return F.softplus(use(model(x))).mean()

    def step(x: Tensor) -> Tensor:
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step, loss_of


@pytest.mark.captured
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_of_a_size(use: Callable[[Tensor, bool], Any]) -> None:
    step, loss_of = _step_of(lambda h: use(h, h.shape[0] > 4))
    sizes = [3, 5, 4, 6]
    assert losses(quick(step, 2, dynamic=True), sizes) == pytest.approx(losses(loss_of, sizes))


@pytest.mark.captured
@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_of_a_number_that_is_drawn(use: Callable[[Tensor, bool], Any]) -> None:
    step, loss_of = _step_of(lambda h: use(h, random.random() < 0.5))
    random.seed(3)
    wanted = losses(loss_of, [3] * 6)
    random.seed(3)
    assert losses(quick(step, 2), [3] * 6) == pytest.approx(wanted)


@pytest.mark.captured
@pytest.mark.parametrize("use", [USES[name] for name in ("is", "is not", "sum", "index")])
def test_of_what_only_the_program_knows(use: Callable[[Tensor, bool], Any]) -> None:
    step, _ = _step_of(lambda h: use(h, bool(h.mean() > 0)))
    with pytest.raises(CaptureError, match="graph break"):
        quick(step, 2)(torch.randn(3, 8))
