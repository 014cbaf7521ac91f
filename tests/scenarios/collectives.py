"""How many all-reduces run, and when."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.nn.parallel import DistributedDataParallel

from tests.counting import counted
from tests.drive import drive, plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import mse
from tests.scenarios.common import Make, data_of, wrapped


def count(
    rank: int,
    wrap: str,
    k: int,
    make: Make = sgd,
    cap: float | None = None,
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """All-reduces that ran: of the first window, and of each micro-step of two more."""
    capped = {} if cap is None else {"bucket_cap_mb": cap}
    model = wrapped(mlp(), wrap, **(capped if wrap == "ddp" else {}))
    optimizer = make(model)
    step = quick(plain_step, k, **(options or {}), **(capped if wrap == "plain" else {}))
    data = data_of(rank, 3, k)
    with counted() as first:
        drive(step, model, optimizer, data[:1])
    each = []
    for batch in data[1] + data[2]:
        with counted() as one:
            step(model, optimizer, *batch)
        each.append((one.all_reduces, one.all_gathers, one.broadcasts))
    report = step.report()
    return {
        "first": first.all_reduces, "each": each, "buckets": len(report.collectives),
        "before": report.collectives_before, "after": report.collectives_after,
        "ranks": report.world_size,
    }  # fmt: skip


def count_eager(rank: int, k: int) -> list[int]:
    """The same count for eager DDP: shows that the counter counts."""
    model = DistributedDataParallel(mlp())
    optimizer = sgd(model)
    found = []
    for synced in (True, False):
        for i, batch in enumerate(data_of(rank, 1, k)[0]):
            quiet = not synced and i + 1 < k
            with counted() as one:
                context: AbstractContextManager[None] = model.no_sync() if quiet else nullcontext()
                with context:
                    mse(model, *batch).backward()
            found.append(one.all_reduces)
    optimizer.zero_grad()
    return found


def buckets(rank: int, cap: float) -> dict[str, Any]:
    """DDP with a flag that is not needed, and buckets of our own size: one window of two."""
    model = DistributedDataParallel(mlp(), static_graph=True)
    optimizer = sgd(model)
    step = quick(plain_step, 2, bucket_cap_mb=cap)
    for batch in data_of(rank, 1, 2)[0]:
        with counted() as last:
            step(model, optimizer, *batch)
    report = step.report()
    return {
        "last": last.all_reduces, "after": report.collectives_after,
        "buckets": [collective.parameters for collective in report.collectives],
        "names": [name for name, _ in model.module.named_parameters()],
        "warnings": report.warnings,
        "weights": [p.detach() for p in model.parameters()],
    }  # fmt: skip
