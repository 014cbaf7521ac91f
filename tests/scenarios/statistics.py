"""BatchNorm statistics on ranks with different amounts of data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.drive import plain_step, untraceable_step
from tests.optimizers import sgd


def _data(rank: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """Around 5: old statistics, which start at 0, are far off."""
    source = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(16, 4, generator=source) + 5, torch.randn(16, 1, generator=source))
        for _ in range(count)
    ]


def _model(wrap: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))
    return DistributedDataParallel(model) if wrap == "ddp" else model


def uneven(
    rank: int, counts: Sequence[int], k: int, wrap: str, options: dict[str, Any], skips: bool
) -> dict[str, Any]:
    """counts: batches of each rank. skips: slots without data in place of an early flush."""
    model = _model(wrap)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = sgd(model)
    eagerly = options.get("on_unsupported") == "eager"
    run = gradsync_fx.optimize(
        untraceable_step if eagerly else plain_step,
        gradient_accumulation_steps=k,
        **{"backend": "aot_eager", **options},
    )
    for x, y in _data(rank, counts[rank]):
        run(model, optimizer, x, y)
    if skips:
        for _ in range(max(counts) - counts[rank]):
            run.skip()
    run.flush()
    return {name: t.detach().clone() for name, t in inner.state_dict().items()}


def joined(rank: int, counts: Sequence[int]) -> dict[str, Any]:
    """What DDP's own `join` ends with."""
    model = _model("ddp")
    optimizer = sgd(model)
    with model.join():  # type: ignore[operator]
        for x, y in _data(rank, counts[rank]):
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    inner: Any = model.module
    return {name: t.detach().clone() for name, t in inner.state_dict().items()}


def two_epochs(rank: int, k: int) -> list[Tensor]:
    """Epochs that end inside a window, rank 0's first; the statistics go on from the first to the second."""
    model = _model("ddp")
    optimizer = sgd(model)
    run = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=k, backend="aot_eager")
    found = []
    for epoch in range(2):
        for x, y in _data(rank, 3 + 4 * rank):
            run(model, optimizer, x + epoch, y)
        run.flush()
        found.append(model.module[0].num_batches_tracked.clone())  # type: ignore[index,union-attr]
    return found
