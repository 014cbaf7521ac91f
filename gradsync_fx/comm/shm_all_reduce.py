"""Ranks on one machine add their buckets up where these lie, in place of sending them to each other and back.

rank 0   | sum | sum |          each rank adds up one share of a bucket, over all ranks, and writes it to all of them
rank 1   | sum | sum |
          share  share
          of 0   of 1

Starting a bucket only notes it. The first wait does the work for all buckets that have been started: the ranks meet
(all have added their last term), each adds up its shares, they meet again (all shares are written). They meet in an
all-reduce of one number, so that a rank that is late or gone shows as it does in any other collective.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.shared_memory import Address, MappedFiles, address
from gradsync_fx.comm.shm_pieces import AT_A_TIME, SharedPieces
from gradsync_fx.ir.ops import ALL_REDUCE_IN_PLACE, WAIT


@dataclass(frozen=True, slots=True, eq=False)
class SharedBucket:
    """One bucket on all ranks, in rank order: flat tensors of one size and dtype. rank: of this process."""

    copies: tuple[torch.Tensor, ...]
    rank: int

    def add_up_share(self) -> None:
        """This rank's share, summed in rank order, so that it doesn't matter whose share an element is in."""
        count, world = self.copies[0].numel(), len(self.copies)
        begin, end = count * self.rank // world, count * (self.rank + 1) // world
        for start in range(begin, end, AT_A_TIME):
            stop = min(start + AT_A_TIME, end)
            total, *others = (copy[start:stop] for copy in self.copies)
            for other in others:
                total.add_(other)
            for other in others:
                other.copy_(total)


class SharedSums:
    """The shared buckets that this rank has started since the ranks last met. meetings: how often they met so far."""

    def __init__(self, group: str) -> None:
        """group: the one in which the ranks meet."""
        self._group, self.meetings = group, 0
        self._started: list[SharedBucket | SharedPieces] = []

    def start(self, bucket: SharedBucket | SharedPieces) -> None:
        """This rank's terms are all in."""
        self._started.append(bucket)

    def wait(self, bucket: SharedBucket | SharedPieces) -> None:
        """From here on a bucket that was started is reduced."""
        if bucket not in self._started:
            return  # an earlier wait did it, too
        self.meet()
        for started in self._started:
            started.add_up_share()
        self.meet()
        self._started.clear()

    def forget(self) -> None:
        """The program that started these was cut off."""
        self._started.clear()

    def meet(self) -> None:
        """All ranks have come this far."""
        WAIT(ALL_REDUCE_IN_PLACE(torch.zeros(1), "sum", self._group))
        self.meetings += 1


def find_shared(line: Line, flats: Sequence[torch.Tensor | None]) -> list[SharedBucket | None]:
    """These buckets, the same on all ranks, where every rank reaches them on every other; all ranks ask together.

    line: with a group. flats: None for a bucket that does not lie in one stretch here. Returns None for each bucket
    that is not shared.
    """
    mine = [None if flat is None else address(flat) for flat in flats]
    texts = line.texts(json.dumps([there and astuple(there) for there in mine]))
    everyone = [[there and Address(*there) for there in json.loads(text)] for text in texts]
    if len({len(addresses) for addresses in everyone}) > 1:  # a rank was told not to
        return [None] * len(flats)
    files = MappedFiles()
    found: list[SharedBucket | None] = []
    for flat, *addresses in zip(flats, *everyone, strict=True):
        found.append(None if flat is None else _reach(files, flat, addresses, line.rank))
    rows = line.gather([float(bucket is not None) for bucket in found])
    agreed = [all(column) for column in zip(*rows, strict=True)]
    return [b if all_reach else None for b, all_reach in zip(found, agreed, strict=True)]


def _reach(
    files: MappedFiles, flat: torch.Tensor, addresses: Sequence[Address | None], rank: int
) -> SharedBucket | None:
    copies = []
    for other, there in enumerate(addresses):
        copy = None if there is None else files.tensor(there, flat.dtype)
        if copy is None:
            return None
        copies.append(flat if other == rank else copy)
    return SharedBucket(tuple(copies), rank)
