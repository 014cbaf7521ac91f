"""A window in which nothing counted, masked in the program: what is written, what is given, and the proof of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.errors import VerificationError
from gradsync_fx.passes import mask, update
from gradsync_fx.runtime import captured_facts
from gradsync_fx.runtime.captured_step import CapturedStep


pytestmark = pytest.mark.captured
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.fixture(autouse=True)
def _behind() -> Iterator[None]:
    """The CPU is taken for a device, whose weights nobody waits for."""
    with mock.patch.object(captured_facts, "runs_behind", return_value=True):
        yield


def average_and_loss(model: nn.Module, optimizer: Optimizer, slow: Tensor, x: Tensor) -> Any:
    """Writes an average of the weights, and returns what the update made of the loss."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        slow.lerp_(model.weight, 0.5)
    return loss, model(x).square().mean(), model.weight.norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_whatever_hangs_on_an_update_is_left_out_with_it(backend: str) -> None:
    """An average of the weights, a loss after the update; a norm of updated weights is not known."""
    model, slow = nn.Linear(4, 1), torch.zeros(1, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = gradsync_fx.optimize(
        average_and_loss, gradient_accumulation_steps=1, skip_nonfinite=True, backend=backend
    )
    fine, bad = torch.randn(3, 4), torch.full((3, 4), torch.nan)
    with mock.patch.object(
        CapturedStep, "_close_masked", autospec=True, side_effect=CapturedStep._close_masked
    ) as masked:
        for _ in range(2):
            step(model, optimizer, slow, fine)
        before = [t.clone() for t in (model.weight, model.bias, slow)]
        counted = masked.call_count
        _, after, norm = step(model, optimizer, slow, bad)
        assert masked.call_count == counted + 1
        with pytest.warns(gradsync_fx.GradSyncWarning, match="no update"):
            saved = optimizer.state_dict()["state"]
    assert [float(s["step"]) for s in saved.values()] == [2.0, 2.0], "a save comes after the news"
    assert norm.isnan()
    assert after.isnan(), "its data is"
    assert step.optimizer_step == 2
    for held, tensor in zip(before, (model.weight, model.bias, slow), strict=True):
        assert torch.equal(held, tensor)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="no update"):
        asked = step(model, optimizer, slow, bad) is not None and step.sync_gradients
    assert not asked
    _, after, norm = step(model, optimizer, slow, fine)
    assert step.sync_gradients
    assert step.optimizer_step == 3
    torch.testing.assert_close(norm, model.weight.detach().norm())
    torch.testing.assert_close(after, model(fine).square().mean().detach())


def test_an_update_that_is_not_masked_is_found() -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync_fx.optimize(
        average_and_loss, gradient_accumulation_steps=1, skip_nonfinite=True, backend="aot_eager"
    )
    with (
        mock.patch.object(update, "unless_empty", lambda draft, new, old: new),
        mock.patch.object(mask, "unless_empty", lambda draft, new, old: new),
        pytest.raises(VerificationError, match="what it was where the window's weight is 0"),
    ):
        step.prepare(model, optimizer, torch.zeros(1, 4), torch.randn(3, 4))
