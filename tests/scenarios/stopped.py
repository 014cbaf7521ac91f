"""Ranks of which one is asked to stop, at some call, and what all of them see."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import gradsync_fx
from tests.drive import plain_step
from tests.models import mlp
from tests.reference import regression


K = 3


def asked(rank: int, at: int, calls: tuple[int, int], kind: str, backend: str) -> dict[str, Any]:
    """Rank 1 is asked at the start of call `at`; each rank has its number of calls, and flushes. Where a rank sees that
    all are to stop, it stops."""
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    manual = kind == "manual"

    def by_hand(model: nn.Module, optimizer: Any, x: Any, y: Any, last: bool) -> Any:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step = gradsync_fx.optimize(
        by_hand if manual else plain_step,
        gradient_accumulation_steps="manual" if manual else K,
        backend=backend,
        sync_each_batch=kind == "each",
    )
    seen, stopped_at = [], None
    batches = [b for w in regression(5, K, seed=rank) for b in w]
    for number, batch in enumerate(batches[: calls[rank]], 1):
        if rank == 1 and number == at:
            step.request_stop()
        more = (number % K == 0,) if manual else ()
        step(model, optimizer, *batch, *more)
        seen.append(step.stop_requested)
        if step.stop_requested:
            stopped_at = number
            break
    flushed = stopped_at is None
    if flushed:
        step.flush()
    return {
        "seen": seen,
        "stopped_at": stopped_at,
        "requested": step.stop_requested,
        "update": step.optimizer_step,
        "pending": step.pending,
        "values": [p.detach().clone() for p in model.parameters()],
    }
