"""Averages of the weights whose decay is made of a number of Python's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import Window, mse, regression


class Average:
    """count: of updates; seen: of calls, which feeds nothing."""

    def __init__(self, model: nn.Module) -> None:
        self.slow, self.count, self.seen = copy.deepcopy(model), 0, 0

    def decay(self) -> float:
        return 1 - 1 / (1 + self.count)

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.count += 1
        decay = self.decay()
        for slow, p in zip(self.slow.parameters(), model.parameters(), strict=True):
            slow.lerp_(p, 1 - decay)


class Counted(Average):
    def decay(self) -> float:
        return min(0.7, (1 + self.count) / (3 + self.count))


def averaging(model: nn.Module, average: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    average.seen += 1
    loss = plain_step(model, optimizer, x, y)
    average.update(model)
    return loss


def reference(
    model: nn.Module, average: Any, optimizer: Optimizer, windows: list[Window], ranks: int = 1
) -> None:
    """Plain eager accumulation."""
    for window in windows:
        for batch in window:
            (mse(model, *batch) / (len(window) * ranks)).backward()
        for p in model.parameters() if ranks > 1 else ():
            dist.all_reduce(p.grad)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)


def averages(rank: int) -> list[Tensor]:
    """Windows of two, with the default backend, and a flush; raises `AssertionError` where they are not eager's."""
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    average, other = Average(model), Average(twin)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (model, twin))
    step = quick(averaging, 2, backend="inductor")
    windows = [*regression(3, 2, seed=rank), *regression(1, 1, seed=5 + rank)]
    for batch in (b for window in windows for b in window):
        step(model, average, optimizer, *batch)
    step.flush()
    reference(twin, other, theirs, windows, ranks=2)
    assert average.count == other.count == 4
    for p, q in zip(average.slow.parameters(), other.slow.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-5, rtol=0)
    return [p.detach().clone() for p in average.slow.parameters()]
