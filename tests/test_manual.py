"""gradient_accumulation_steps="manual": the step decides by reaching its optimizer or not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.eagerly import programs
from tests.models import mlp
from tests.reference import accumulation, mse, regression


def flagged(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, last: bool) -> Tensor:
    loss = mse(model, x, y)
    loss.backward()
    if last:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return loss


def test_the_flag_alternates_and_nothing_is_compiled_again() -> None:
    """Windows of 3, 2, 1, 4 and, closed by flush, 2: all equal to the eager loop."""
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, other))
    step: Any = gradsync_fx.optimize(
        flagged, gradient_accumulation_steps="manual", backend="aot_eager"
    )
    for n, length in enumerate((3, 2, 1, 4, 2)):
        (window,) = regression(1, length, seed=n)
        for i, batch in enumerate(window):
            last = n < 4 and i + 1 == length
            step(model, optimizer, *batch, last)
            assert step.sync_gradients is last
            assert step.pending == (0 if last else i + 1)
        assert step.compile_count == programs(2)
        if n == 4:
            step.flush()
            assert step.sync_gradients
        accumulation(
            other, theirs, [window],
            before=lambda: nn.utils.clip_grad_norm_(other.parameters(), 0.5),
        )  # fmt: skip
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)
    assert (step.optimizer_step, step.compile_count) == (5, programs(3))


@pytest.mark.captured
def test_flush_before_any_update_was_seen() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step: Any = gradsync_fx.optimize(
        flagged, gradient_accumulation_steps="manual", backend="aot_eager"
    )
    (batch,) = regression(1, 1)[0]
    step(model, optimizer, *batch, False)
    with pytest.raises(gradsync_fx.WindowError, match="nothing yet that reaches an update"):
        step.flush()
    with pytest.raises(gradsync_fx.WindowError, match="skip"):
        step.skip()
    assert step.pending == 1
    step.prepare(model, optimizer, *batch, True)
    step.flush()
    assert (step.optimizer_step, step.pending) == (1, 0)


def test_a_closing_call_with_other_parameters_updates_what_the_window_holds() -> None:
    """A branch on a Python value in each micro-step; the flag as before."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)

        def forward(self, x: Tensor, head: str) -> Tensor:
            return self.a(x) if head == "a" else self.b(x)

    def step_of(
        model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, head: str, last: bool
    ) -> Tensor:
        loss = nn.functional.mse_loss(model(x, head), y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    model = Heads()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, other))
    step = gradsync_fx.optimize(step_of, gradient_accumulation_steps="manual", backend="aot_eager")
    for n in range(3):
        (window,) = regression(1, 3, seed=n)
        for (x, y), head, last in zip(window, "aab", (False, False, True), strict=True):
            step(model, optimizer, x, y, head, last)
            (nn.functional.mse_loss(other(x, head), y) / 3).backward()
        theirs.step()
        theirs.zero_grad()
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)
