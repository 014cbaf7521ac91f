"""The public API on one page."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync_fx
from tests.eagerly import programs


@pytest.mark.captured
def test_a_window_of_three() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = model.weight.detach().clone()

    @gradsync_fx.optimize(gradient_accumulation_steps=3, backend="aot_eager")
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for i in range(1, 7):
        loss = step(torch.ones(1, 2) * i, torch.ones(1, 1))
        assert not loss.requires_grad
        assert step.sync_gradients == (i % 3 == 0)
        assert (step.micro_step, step.optimizer_step, step.pending) == (i, i // 3, i % 3)
        assert torch.equal(model.weight, start) == (i < 3)
    assert step.compile_count == programs(2)
    assert all(p.grad is None for p in model.parameters())
    assert set(step.programs) == {"accumulate", "boundary"}
    assert set(step.gradients()) == {"weight", "bias"}

    step(torch.ones(1, 2), torch.ones(1, 1))
    assert step.pending == 1
    step.flush()
    assert (step.optimizer_step, step.pending, step.sync_gradients) == (3, 0, True)
    assert all(bool((g == 0).all()) for g in step.gradients().values())
    report = step.report()
    assert report.k == 3
    assert "gradient collectives" in str(report)
