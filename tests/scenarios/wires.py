"""The two ops of inplace_all_reduce.py on sums of every kind of place."""

from __future__ import annotations

import torch
from torch.distributed import group

from gradsync_fx._torch import started_collectives
from gradsync_fx.comm.flat_bucket import FlatBuckets
from gradsync_fx.comm.flat_buffers import allocate
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS


FORMS = [torch.empty(2, 3), torch.empty(()), torch.empty(5)]


def reduced(rank: int, layout: str, wire: torch.dtype, known: bool) -> list[torch.Tensor]:
    """Sums of 1/3 on rank 0 and 2/3 on rank 1. layout: "flat", or "apart". known: the step has a bucket of them."""
    sums = (
        allocate(FORMS, torch.float32)
        if layout == "flat"
        else [torch.zeros(f.shape) for f in FORMS]
    )
    others = allocate(FORMS, torch.float32)
    for total in sums:
        total.fill_((1 + rank) / 3)
    name = group.WORLD.group_name
    with FlatBuckets([sums] if known else []).in_use():
        START_SUMS(sums, "sum", name, wire)
        START_SUMS(others, "sum", name, wire)
        WAIT_SUMS(sums)
        WAIT_SUMS(others)
    assert all(not total.any() for total in others)
    return sums


def counted(rank: int) -> tuple[int | None, int | None]:
    """The number of collectives that the group has started, before two all-reduces and after them."""
    before = started_collectives(group.WORLD)
    for _ in range(2):
        torch.distributed.all_reduce(torch.ones(1))
    return before, started_collectives(group.WORLD)
