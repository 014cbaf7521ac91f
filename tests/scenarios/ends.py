"""Ranks whose data end at different points, or that skip a slot of a window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.drive import plain_step, quick, step_of
from tests.models import Lin, mlp
from tests.optimizers import adamw, sgd
from tests.reference import regression


def uneven(rank: int, counts: Sequence[int], k: int) -> dict[str, Any]:
    """Rank r has counts[r] micro-steps with x = 1, 2, ... + 10 r, then flushes."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), k)
    updates = []
    for i in range(counts[rank]):
        step(model, optimizer, torch.tensor(float(1 + i + 10 * rank)))
        if step.sync_gradients:
            updates.append(model.w.item())
    step.flush(on_update=lambda: updates.append(model.w.item()))
    return {"updates": updates, "steps": step.optimizer_step, "pending": step.pending}


def weight_alone(rank: int) -> dict[str, Any]:
    """A parameter without a module: rank 0 has five micro-steps, rank 1 three, then both flush."""
    w = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([w], lr=1.0)

    def step(x: Tensor) -> None:
        (w * x).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = quick(step, 2)
    for x in ((1.0, 2.0, 3.0, 4.0, 5.0), (10.0, 20.0, 30.0))[rank]:
        run(torch.tensor(x))
    run.flush()
    return {"weight": w.detach(), "steps": run.optimizer_step, "pending": run.pending}


def skipping(rank: int) -> dict[str, Any]:
    """Rank 1 skips one slot, first and then last: the mean is over the three terms that were summed."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 2)
    step.prepare(model, optimizer, torch.tensor(0.0))
    weights, synced = [], []
    for where in (0, 1):
        for i in range(2):
            if rank == 1 and i == where:
                step.skip()
            else:
                step(model, optimizer, torch.tensor(float(1 + i + 10 * rank)))
            synced.append(step.sync_gradients)
        weights.append(model.w.item())
    return {"weights": weights, "synced": synced, "calls": step.micro_step}


def two_epochs(rank: int, k: int) -> list[tuple[int, int]]:
    """Five micro-steps and a flush, twice."""
    model = mlp()
    optimizer = adamw(model)
    step = quick(plain_step, k)
    seen = []
    for epoch in range(2):
        for batch in regression(1, 5, seed=rank + epoch)[0]:
            step(model, optimizer, *batch)
        step.flush()
        seen.append((step.optimizer_step, step.pending))
    return seen
