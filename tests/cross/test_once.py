"""What a window computes once, as code for a GPU."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

import gradsync_fx


pytestmark = [pytest.mark.cross, pytest.mark.captured]


def test_accumulate_calls_start_and_move_less() -> None:
    model = nn.Sequential(weight_norm(nn.Linear(1024, 1024)), nn.ReLU(), nn.Linear(1024, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    batch = torch.randn(4, 1024), torch.randint(0, 8, (4,))
    found = gradsync_fx.explain(
        train_step, *batch, gradient_accumulation_steps=4, target="cuda:sm_90"
    )
    assert found.once is not None
    assert found.code is not None
    programs = {p.name: p for p in found.code.programs}
    assert {"accumulate", "boundary", "prologue", "fold"} <= set(programs)
    # A weight of 4 MiB is at least read and written less.
    assert found.once.moved is not None
    assert found.once.moved > 2 * 4 * 1024 * 1024
    assert found.once.launches is not None
    assert found.once.launches > 0
    names = [kernel.name for kernel in programs["accumulate"].kernels]
    assert not [n for n in names if "weight_norm" in n or "rsqrt" in n or "pow" in n]
