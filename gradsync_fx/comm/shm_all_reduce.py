"""Ranks on one machine add their buckets up where these lie, in place of sending them to each other and back.

rank 0   | sum | sum |          each rank adds up one share of a bucket, over all ranks, and writes it to all of them
rank 1   | sum | sum |
          share  share
          of 0   of 1

What a bucket's start only notes is done at the first wait that needs it, for all that was started till then: the ranks
meet (all have added their last term), each adds up its shares, they meet again (all shares are written). They meet in
an all-reduce of one number, so that a rank that is late or gone shows as it does in any other collective.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import astuple, dataclass

import torch

from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.shared_memory import Address, Reached, address
from gradsync_fx.ir.ops import ALL_REDUCE_IN_PLACE, WAIT


# Added up and written out by so many elements at a time: these are still in the core's own cache when they go out.
_AT_A_TIME = 2**16


@dataclass(frozen=True, slots=True, eq=False)
class SharedBucket:
    """One bucket on all ranks, in rank order: flat tensors of one size and dtype. rank: of this process."""

    copies: tuple[torch.Tensor, ...]
    rank: int

    def add_up_share(self) -> None:
        """This rank's share, summed in rank order, so that it doesn't matter whose share an element is in."""
        count, world = self.copies[0].numel(), len(self.copies)
        begin, end = count * self.rank // world, count * (self.rank + 1) // world
        for start in range(begin, end, _AT_A_TIME):
            stop = min(start + _AT_A_TIME, end)
            total, *others = (copy[start:stop] for copy in self.copies)
            for other in others:
                total.add_(other)
            for other in others:
                other.copy_(total)


class SharedBuckets:
    """The buckets of one layout that every rank reaches on every other; all ranks have the same ones."""

    def __init__(self, group: str, buckets: Sequence[SharedBucket]) -> None:
        self._group = group
        self._by_place = {b.copies[b.rank].data_ptr(): b for b in buckets}
        self._started: list[SharedBucket] = []

    def __len__(self) -> int:
        return len(self._by_place)

    def start(self, flat: torch.Tensor) -> bool:
        """This rank's terms are all in. False for what is none of these buckets."""
        bucket = self._by_place.get(flat.data_ptr())
        if bucket is None or bucket.copies[0].numel() != flat.numel():
            return False
        self._started.append(bucket)
        return True

    def wait(self, flat: torch.Tensor) -> None:
        """From here on a bucket that was started is reduced."""
        if self._by_place[flat.data_ptr()] not in self._started:
            return  # an earlier wait did it, too
        self._meet()
        for bucket in self._started:
            bucket.add_up_share()
        self._meet()
        self._started.clear()

    def _meet(self) -> None:
        WAIT(ALL_REDUCE_IN_PLACE(torch.zeros(1), "sum", self._group))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """While a program runs that all ranks run: its starts and waits come here."""
        self._started.clear()  # of a program that was cut off
        token = _IN_USE.set(self)
        try:
            yield
        finally:
            _IN_USE.reset(token)


_IN_USE: ContextVar[SharedBuckets | None] = ContextVar("gradsync_fx shared buckets", default=None)


def shared_buckets() -> SharedBuckets | None:
    """Those of the program that runs, if it has any."""
    return _IN_USE.get()


def find_shared(line: Line, flats: Sequence[torch.Tensor | None]) -> SharedBuckets:
    """Which of these buckets, the same on all ranks, lie where every rank reaches them; all ranks ask together.

    line: with a group. flats: None for a bucket that does not lie in one stretch here.
    """
    assert line.group is not None
    group = line.group.group_name
    mine = [None if flat is None else address(flat) for flat in flats]
    texts = line.texts(json.dumps([there and astuple(there) for there in mine]))
    everyone = [[there and Address(*there) for there in json.loads(text)] for text in texts]
    if len({len(places) for places in everyone}) > 1:  # a rank was told not to
        return SharedBuckets(group, [])
    reached = Reached()
    found: list[SharedBucket | None] = []
    for flat, *places in zip(flats, *everyone, strict=True):
        found.append(None if flat is None else _reach(reached, flat, places, line.rank))
    rows = line.gather([float(bucket is not None) for bucket in found])
    agreed = [all(column) for column in zip(*rows, strict=True)]
    return SharedBuckets(
        group, [b for b, all_reach in zip(found, agreed, strict=True) if b and all_reach]
    )


def _reach(
    reached: Reached, flat: torch.Tensor, places: Sequence[Address | None], rank: int
) -> SharedBucket | None:
    copies = []
    for other, there in enumerate(places):
        copy = None if there is None else reached.tensor(there, flat.dtype)
        if copy is None:
            return None
        copies.append(flat if other == rank else copy)
    return SharedBucket(tuple(copies), rank)
