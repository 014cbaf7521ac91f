"""What ranks do that share memory: buckets above the least size, compiled by Inductor, or the buckets by themselves."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.comm import flat_bucket, shm_all_reduce
from gradsync_fx.comm.flat_bucket import FlatBuckets
from gradsync_fx.comm.flat_buffers import allocate
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.shared_memory import open_room
from tests.drive import step_of
from tests.reference import Window


class Wide(nn.Module):
    """More than 1 MiB of parameters, in several buckets; `other` takes the second head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh())
        self.heads = nn.ModuleList(nn.Linear(512, 1) for _ in range(2))

    def forward(self, x: Tensor, other: bool = False) -> Tensor:
        out: Tensor = self.heads[other](self.body(x))
        return out


def loss_of(model: nn.Module, x: Tensor, y: Tensor, other: bool) -> Tensor:
    return nn.functional.mse_loss(model(x, other), y)


def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Wide()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@contextmanager
def sent() -> Any:
    """The number of elements of each all-reduce inside the block that goes over the wire."""
    sizes: list[int] = []

    def send(flat: Tensor, *args: Any) -> Any:
        sizes.append(flat.numel())
        return reduce(flat, *args)

    reduce: Callable[..., Any] = flat_bucket.ALL_REDUCE_IN_PLACE
    with (
        mock.patch.object(flat_bucket, "ALL_REDUCE_IN_PLACE", send),
        mock.patch.object(shm_all_reduce, "ALL_REDUCE_IN_PLACE", send),
    ):
        yield sizes


def windows(
    rank: int, data: list[list[Window]], branches: list[list[bool]], options: dict[str, Any]
) -> dict[str, Any]:
    """Parameters and what was sent after each window, the last one flushed.

    data: of each rank. branches: for each window, whether each rank takes the second head.
    """
    model, optimizer = fresh()
    mine = data[rank]
    given = {"gradient_accumulation_steps": 2, "bucket_cap_mb": 0.25, **options}
    if given.pop("only_rank", rank) != rank:
        given.pop("without")
    step = gradsync_fx.optimize(step_of(loss_of), **given)
    found: dict[str, Any] = {"parameters": [], "sent": []}
    for window, other in zip(mine, branches, strict=True):
        with sent() as sizes:
            for batch in window:
                step(model, optimizer, *batch, other[rank])
            if window is mine[-1]:
                step.flush()
        found["sent"].append(sizes)
        found["parameters"].append([p.detach().clone() for p in model.parameters()])
    return found


FORMS = [torch.empty(300, 100), torch.empty(()), torch.empty(70_001)]


def added_up(rank: int, dtype: torch.dtype, own: bool) -> dict[str, Any]:
    """Two buckets of 1/3 of the rank's number and one, in place. own: whether the last rank's lie in shared memory."""
    group = dist.group.WORLD
    assert group is not None
    world = dist.get_world_size()
    size = sum(form.numel() for form in FORMS) * dtype.itemsize
    room = open_room([size, size]) if own or rank < world - 1 else None
    buckets = [allocate(FORMS, dtype, room) for _ in range(2)]
    flat_buckets = FlatBuckets(buckets)
    shared = flat_buckets.share(Line(group, None), buckets)
    with sent() as sizes, flat_buckets.in_use(together=True):
        for _ in range(2):
            for sums in buckets:
                for total in sums:
                    total.fill_((1 + rank) / 3)
            for sums in buckets:
                START_SUMS(sums, "sum", group.group_name, dtype)
            for sums in buckets:
                WAIT_SUMS(sums)
    return {"sums": buckets, "shared": shared, "sent": sizes}


def gone_between(rank: int, when: str) -> dict[str, Any]:
    """The last rank dies before it starts its bucket, or when the ranks have met; what the others see."""
    group = dist.group.WORLD
    assert group is not None
    room = open_room([4 * form.numel() for form in FORMS])
    sums = allocate(FORMS, torch.float32, room)
    flat_buckets = FlatBuckets([sums])
    flat_buckets.share(Line(group, None), [sums])
    dying = rank == dist.get_world_size() - 1

    def die(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        with flat_buckets.in_use(together=True):
            if dying and when == "before":
                die()
            START_SUMS(sums, "sum", group.group_name, torch.float32)
            with (
                mock.patch.object(shm_all_reduce.SharedBucket, "add_up_share", die)
                if dying
                else nullcontext()
            ):
                WAIT_SUMS(sums)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}
