"""Steps with effects: windows of two calls, one that ends in a skip, and one that ends in a flush."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tests.drive import quick
from tests.eagerly import eagerly
from tests.effects import TRIED, Plain, World, step_of
from tests.reference import regression


# calls of each window, and what ends it
WINDOWS = ((2, ""), (2, ""), (1, "skip"), (1, "flush"))
OPTIONS: dict[str, Any] = {
    "broadcast_buffers": "never"
}  # each rank's own: the reference has no DDP


def with_effects(
    rank: int, names: Sequence[str], *, eager: bool = False, **options: Any
) -> dict[str, Any]:
    """Runs both; raises `AssertionError` where they differ. Returns the parameters, for a comparison of ranks."""
    rows = [t for t in TRIED if t.name in names]
    assert len(rows) == len(names)
    ours, theirs = (_world(rows) for _ in range(2))
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    plain = Plain(theirs, rows, ranks)
    batches = [b for (b,) in regression(sum(n for n, _ in WINDOWS), 1, seed=rank)]
    for x, _ in batches if "gradient of an input" in names else ():
        x.requires_grad_()
    copies = [(x.detach().clone().requires_grad_(x.requires_grad), y.clone()) for x, y in batches]
    seen, wanted = list[Any](), list[Any]()
    with eagerly() if eager else nullcontext(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* runs as it is|the step runs eagerly|.*functional")
        step = quick(step_of(rows), 2, **OPTIONS, **options)
        torch.manual_seed(3)
        for n, end in WINDOWS:
            for x, y in (batches.pop(0) for _ in range(n)):
                loss, found = step(ours, ours.optimizer, x, y)
                seen.append((loss.detach(), x.detach().clone(), x.grad))
            if end:
                getattr(step, end)()
            seen.append((_tensors(found) if not end else [], ours.observed()))
    torch.manual_seed(3)
    for n, end in WINDOWS:
        for x, y in (copies.pop(0) for _ in range(n)):
            loss = plain.call(x, y)
            wanted.append((loss, x.detach().clone(), x.grad))
        results = _tensors(plain.update())
        wanted.append((results if not end else [], theirs.observed()))
    assert step.optimizer_step == len(WINDOWS)
    for i, (a, b) in enumerate(zip(seen, wanted, strict=True)):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5, msg=f"observation {i}: {{}}".format)
    return {"parameters": [p.detach().clone() for p in ours.net.parameters() if p.requires_grad]}


def _world(rows: Any) -> World:
    world = World()
    for row in rows:
        row.prepare(world)
    return world


def _tensors(found: list[Any]) -> list[Tensor]:
    return [f.detach().clone() for f in found if f is not None]


def each_alone(rank: int, names: Sequence[str], eager: bool) -> list[dict[str, Any]]:
    """One row after the other."""
    return [with_effects(rank, [name], eager=eager) for name in names]


def together(rank: int, names: Sequence[str]) -> dict[str, Any]:
    """All of them in one step, with the default backend."""
    return with_effects(rank, names, backend="inductor")
