"""Steps whose updates are watched, on one rank of several, beside the same windows by hand in plain eager PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.models import mlp
from tests.reference import mse


K, WINDOWS = 2, 3
LIMIT = 0.05
# (window, slot, rank) of what is no ordinary micro-step.
SKIPPED = frozenset({(1, 0, 1)})
INFINITE = frozenset({(1, 1, 0), (2, 0, 0)})
Row = dict[str, Any]


def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def untraceable(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor
) -> tuple[Tensor, Tensor]:
    loss = mse(model, x, y)
    if not loss.item() < -1:
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


def named(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    norm = torch.zeros(())
    loss = mse(model, x, y)
    loss.backward()
    norm = norm + nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
    optimizer.step()
    optimizer.zero_grad()
    return {"norm": norm, "loss": loss}


STEPS: dict[str, Callable[..., Any]] = {
    "captured": train_step,
    "eager": untraceable,
    "named": named,
}


def batch(window: int, slot: int, rank: int, infinite: bool) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * window + 10 * slot + rank)
    x, y = torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source)
    if infinite and (window, slot, rank) in INFINITE:
        x[0, 0] = math.inf
    return x, y


def made() -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def records(
    rank: int,
    world: int,
    kind: str,
    more: dict[str, Any],
    watcher: int = 0,
    skips: bool = False,
    infinite: bool = False,
) -> tuple[list[Row], list[Tensor], list[str]]:
    """WINDOWS windows, and one of a single micro-step that is flushed: records, parameters, warnings aside."""
    found: list[Row] = []
    model, optimizer, scheduler = made()
    order: list[str] = []

    def on_update(record: gradsync_fx.UpdateRecord) -> None:
        found.append(record.as_dict())
        order.append("record")

    if kind == "eager":
        more = {**more, "on_unsupported": "eager"}
    step = gradsync_fx.optimize(
        STEPS[kind],
        gradient_accumulation_steps=K,
        on_update=on_update if rank == watcher else None,
        **more,
    )
    for window in range(WINDOWS):
        for slot in range(K):
            if skips and (window, slot, rank) in SKIPPED:
                step.skip()
            else:
                step(model, optimizer, *batch(window, slot, rank, infinite))
            if step.sync_gradients:
                scheduler.step()
                order.append("call")
    step(model, optimizer, *batch(WINDOWS, 0, rank, infinite))
    step.flush(on_update=lambda: order.append("flush"))
    return found, [p.detach().clone() for p in model.parameters()], order


def by_hand(world: int, skips: bool, infinite: bool) -> tuple[list[Row], list[Tensor]]:
    """The same with one process that has all ranks' data."""
    model, optimizer, scheduler = made()
    rows = []
    for window in range(WINDOWS + 1):
        losses, slots = [], K if window < WINDOWS else 1
        left_out = 0
        for slot in range(slots):
            for rank in range(world):
                loss = mse(model, *batch(window, slot, rank, infinite))
                if skips and (window, slot, rank) in SKIPPED or not loss.detach().isfinite():
                    left_out += 1
                    continue
                losses.append(loss)
        mean = torch.stack(losses).mean()
        mean.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        rows.append(
            {
                "loss": float(mean.detach()),
                "gradient_norms": (float(norm.detach()),),
                "terms": len(losses),
                "skipped": left_out,
                "learning_rates": (optimizer.param_groups[0]["lr"],),
                "update": window + 1,
                "micro_step": K * window + slots,
            }
        )
        optimizer.step()
        optimizer.zero_grad()
        if window < WINDOWS:
            scheduler.step()
    return rows, [p.detach().clone() for p in model.parameters()]


def raising(rank: int) -> dict[str, Any]:
    """A callback of one rank that raises after the first update; the run goes on after it."""
    model, optimizer, _ = made()

    def on_update(record: gradsync_fx.UpdateRecord) -> None:
        if record.update in (1, 3):
            raise ValueError(f"of update {record.update}")

    step = gradsync_fx.optimize(
        train_step,
        gradient_accumulation_steps=K,
        on_update=on_update if rank == 0 else None,
        backend="aot_eager",
    )
    raised, pending = [], []
    for window in range(2):
        for slot in range(K):
            try:
                step(model, optimizer, *batch(window, slot, rank, False))
            except ValueError as error:
                raised.append((str(error), *error.__notes__))
                pending.append((step.pending, step.optimizer_step))
    step(model, optimizer, *batch(2, 0, rank, False))
    try:
        step.flush()
    except ValueError as error:
        raised.append((str(error), *error.__notes__))
        pending.append((step.pending, step.optimizer_step))
    return {
        "raised": raised,
        "pending": pending,
        "values": [p.detach().clone() for p in model.parameters()],
    }


def loss_is_asked_for_late(rank: int) -> tuple[list[float | None], list[float]]:
    """Records that are kept, and asked only when later windows are over: the means of their own windows."""
    model, optimizer, _ = made()
    kept: list[gradsync_fx.UpdateRecord] = []
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=K, on_update=kept.append, backend="aot_eager"
    )
    own = [
        float(step(model, optimizer, *batch(window, slot, rank, False)))
        for window in range(WINDOWS)
        for slot in range(K)
    ]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    means = [
        sum(sum(one[K * w : K * w + K]) for one in everyone) / K / len(everyone)
        for w in range(WINDOWS)
    ]
    return [record.loss for record in kept], means
