"""Updates that are shared out on one machine: other scenarios, with small buckets in memory; pieces by themselves."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

import gradsync_fx
from gradsync_fx.comm import scattered_bucket
from gradsync_fx.comm.flat_bucket import FlatBuckets
from gradsync_fx.comm.flat_buffers import allocate
from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.comm.inplace_pieces import GATHER_PIECES, START_PIECES
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.shared_memory import open_room
from gradsync_fx.comm.shm_pieces import SharedParameters, SharedPieces
from gradsync_fx.errors import RankLostError
from gradsync_fx.optim.shares import Portion
from gradsync_fx.planning import shareable
from tests.drive import plain_step
from tests.scenarios import sharded


@contextmanager
def counted(cls: Any, name: str, found: Counter[str]) -> Iterator[None]:
    """Counts the calls of a function or a method inside the block."""
    plain: Callable[..., Any] = getattr(cls, name)

    def call(*args: Any, **options: Any) -> Any:
        found[name] += 1
        return plain(*args, **options)

    with mock.patch.object(cls, name, call):
        yield


def beside(
    rank: int, module: str, name: str, *args: Any, least: int = 0
) -> tuple[Any, dict[str, int]]:
    """What another scenario gives where buckets of any size are shared in memory, and how often pieces were.

    least: bytes of all buckets, below which they are sent.
    """
    found: Counter[str] = Counter()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shareable, "LEAST_BYTES", least))
        stack.enter_context(counted(SharedPieces, "add_up_share", found))
        stack.enter_context(counted(SharedParameters, "put", found))
        stack.enter_context(counted(scattered_bucket, "gather_shares", found))
        stack.enter_context(counted(scattered_bucket.ScatteredBucket, "start", found))
        given = getattr(importlib.import_module(module), name)(rank, *args)
    return given, dict(found)


def sent(rank: int, module: str, name: str, *args: Any) -> tuple[Any, dict[str, int]]:
    """Likewise where no bucket is large enough."""
    return beside(rank, module, name, *args, least=1 << 40)


def wire(rank: int, dtype: torch.dtype | None, shard: bool) -> list[Tensor]:
    """Parameters after four windows, compiled."""
    model = sharded.net()
    optimizer = sharded.made("momentum", model)
    step = gradsync_fx.optimize(
        plain_step, gradient_accumulation_steps=2, shard_optimizer=shard, reduce_dtype=dtype
    )
    x, y = sharded.batches(32)
    world = dist.get_world_size()
    for i in range(8):
        step(model, optimizer, x[world * i + rank], y[world * i + rank])
    return sharded.held(model)


def reported(rank: int, options: dict[str, Any]) -> dict[str, list[tuple[str, str]]]:
    """The ways of all buckets before the first window closes, and after it; also as text."""
    model = sharded.net()
    optimizer = sharded.made("AdamW", model)
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, **options)
    x, y = sharded.batches(4)
    step(model, optimizer, x[rank], y[rank])
    before = [(c.way, c.way_back) for c in step.report().collectives]
    step(model, optimizer, x[2 + rank], y[2 + rank])
    after = step.report()
    assert after.collectives[0].way in str(after)
    return {"before": before, "after": [(c.way, c.way_back) for c in after.collectives]}


FORMS = [torch.empty(300, 100), torch.empty(7), torch.empty(70_001)]
NAMES = ["first", "second", "third"]


def cuts_of(world: int) -> list[int]:
    """The second parameter is the last rank's."""
    portions = [Portion.split(f.numel(), world) for f in FORMS]
    portions[1] = Portion.whole(FORMS[1].numel(), world - 1, world)
    return [cut for portion in portions if portion is not None for cut in portion.cuts]


class Buckets:
    """One bucket and its parameters on this rank. own: whether the last rank's lie in shared memory."""

    def __init__(self, rank: int, dtype: torch.dtype, own: bool = True) -> None:
        group = dist.group.WORLD
        assert group is not None
        self.world, self.rank, self.group = dist.get_world_size(), rank, group.group_name
        size = sum(form.numel() for form in FORMS) * dtype.itemsize
        room = open_room([size]) if own or rank < self.world - 1 else None
        self.sums = allocate(FORMS, dtype, room)
        self.parameters = [torch.zeros_like(form, dtype=dtype) for form in FORMS]
        self.numbers = cuts_of(self.world)
        self.flat = FlatBuckets([self.sums])
        named = dict(zip(NAMES, self.parameters, strict=True))
        self.shared = self.flat.share(Line(group, None), [self.sums], named)

    def cut(self, tensors: list[Tensor]) -> list[Tensor]:
        """This rank's pieces of some tensors."""
        each = self.world + 1
        found = []
        for i, tensor in enumerate(tensors):
            start, end = self.numbers[i * each :][self.rank : self.rank + 2]
            found.append(tensor.reshape(-1)[start:end].clone())
        return found

    def reduced(self, wire: torch.dtype) -> list[Tensor]:
        START_PIECES(self.sums, self.group, wire, self.numbers, self.rank)
        WAIT_SUMS(self.sums)
        return self.cut(self.sums)

    def gathered(self, value: float, last: bool = True) -> list[Tensor]:
        """Parameters, of which each rank's pieces are this value times its number from 1 up."""
        pieces = self.cut([torch.full_like(p, value * (1 + self.rank)) for p in self.parameters])
        given = (self.parameters, pieces, "\n".join(NAMES), self.group, last)
        GATHER_PIECES(*given, self.numbers, self.rank)
        return [p.clone() for p in self.parameters]


def exchanged(
    rank: int, dtype: torch.dtype, wire_dtype: torch.dtype, own: bool, together: bool
) -> dict[str, Any]:
    """Two windows of one bucket of random terms: its reduced pieces, and the parameters; the second gather at once
    behind the first, while a slow rank still reads."""
    buckets = Buckets(rank, dtype, own)
    terms = [
        torch.randn(form.shape, generator=torch.Generator().manual_seed(10 * i + rank)).to(dtype)
        for i, form in enumerate(FORMS)
    ]
    found: dict[str, Any] = {"shared": buckets.shared, "terms": terms, "pieces": []}
    with buckets.flat.in_use(together=together):
        for _ in range(2):
            for total, term in zip(buckets.sums, terms, strict=True):
                total.copy_(term)
            found["pieces"].append(buckets.reduced(wire_dtype))
    with buckets.flat.in_use(together=together):
        found["once"] = buckets.gathered(1.0)
        plain = Tensor.copy_

        def slow(tensor: Tensor, *args: Any) -> Tensor:
            time.sleep(0.1)
            return plain(tensor, *args)

        if rank == 0:
            with mock.patch.object(Tensor, "copy_", slow):
                found["twice"] = buckets.gathered(2.0)
        else:
            found["twice"] = buckets.gathered(2.0)
        found["third"] = buckets.gathered(3.0)
    return found


STRIKES = {"adding": (SharedPieces, "add_up_share"), "putting": (SharedParameters, "put")}


def _die(*_: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def gone(rank: int, when: str) -> dict[str, str]:
    """The last rank dies, before it has put its new pieces or when it is to add up; what the others see."""
    buckets = Buckets(rank, torch.float32)
    try:
        with buckets.flat.in_use(together=True), ExitStack() as stack:
            if rank == buckets.world - 1:
                stack.enter_context(mock.patch.object(*STRIKES[when], _die))
            buckets.reduced(torch.float32)
            buckets.gathered(1.0)
    except RuntimeError as error:
        return {"error": str(error)}
    return {"error": ""}


def lost_in_a_step(rank: int, when: str) -> dict[str, str]:
    """The last rank dies inside of the update half of a step; what the others are told."""
    model = sharded.net()
    optimizer = sharded.made("AdamW", model)
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, shard_optimizer=True)
    x, y = sharded.batches(24)
    world = dist.get_world_size()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(shareable, "LEAST_BYTES", 0))
        for i in range(4):
            if i == 3 and rank == world - 1:
                stack.enter_context(mock.patch.object(*STRIKES[when], _die))
            try:
                step(model, optimizer, x[world * i + rank], y[world * i + rank])
            except RankLostError as error:
                return {"error": str(error)}
    return {"error": ""}
