"""A bucket at run time: its running sums, the flat tensor below them, and how that is reduced.

sent          one all-reduce of the flat tensor as it lies; of a copy, where the wire has another dtype or the sums
              do not lie in one stretch (a bucket by name, saved sums of another layout, a running weight among them)
in memory     never sent: the ranks of one machine add it up where it lies (shm_all_reduce.py)

The two ops in inplace_all_reduce.py are given tensors. They find the bucket in the `FlatBuckets` of the captured step
that runs: its only owner, which holds the tensors as well, so that no other tensor can lie where they do.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch.profiler import record_function

from gradsync_fx._torch import profiler_enabled
from gradsync_fx.comm import scattered_bucket
from gradsync_fx.comm.cuts import Cuts
from gradsync_fx.comm.flat_buffers import allocate, contiguous_view, piece_of, stretches
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.scattered_bucket import ScatteredBucket, SharesUnderWay
from gradsync_fx.comm.shm_all_reduce import SharedBucket, SharedSums, find_shared
from gradsync_fx.comm.shm_pieces import PiecesRoom, SharedParameters, SharedPieces
from gradsync_fx.ir.ops import ALL_REDUCE_IN_PLACE, WAIT


class FlatBucket:
    """One bucket of running sums.

    sums: views of `flat`, or tensors anywhere. They stay the same.
    flat: the contiguous view of all sums; None where they do not lie in one stretch.
    shared: the bucket on all ranks, where each rank reaches it in memory. None until the ranks have found that out.
    sent: what is being reduced over the wire; None but between a start and its wait.
    """

    def __init__(self, sums: Sequence[torch.Tensor]) -> None:
        self.sums = tuple(sums)
        self.flat = contiguous_view(self.sums)
        self.shared: SharedBucket | None = None
        self.sent: torch.Tensor | None = None

    def start(self, op: str, group: str, wire: torch.dtype) -> None:
        """Starts its all-reduce. From here until the wait nobody may read or write the sums."""
        flat = self.flat
        if flat is None:
            copies = allocate(self.sums, self.sums[0].dtype)
            for copy, total in zip(copies, self.sums, strict=True):
                copy.copy_(total)
            flat = contiguous_view(copies)
            assert flat is not None
        self.sent = flat.to(wire)
        ALL_REDUCE_IN_PLACE(self.sent, op, group)

    def wait(self) -> None:
        """From here on the sums are reduced."""
        assert self.sent is not None
        reduced, self.sent = WAIT(self.sent), None
        if self.flat is None:
            parts = reduced.split(stretches(self.sums))
            for total, part in zip(self.sums, parts, strict=True):
                total.copy_(piece_of(part, total))
        elif reduced.dtype is not self.flat.dtype:
            self.flat.copy_(reduced)


# Where the sums of a bucket lie. Buckets with equal keys hold no elements, or are the same one.
_Key = tuple[tuple[int, int], ...]


def _key(sums: Iterable[torch.Tensor]) -> _Key:
    return tuple((total.data_ptr(), total.numel()) for total in sums)


class FlatBuckets:
    """The buckets of one captured step, and which of them are being reduced.

    Any other sums that its programs reduce (with a running weight, say) are a bucket for as long as that takes.
    waited: how often it was waited for one, and the seconds of that.
    """

    def __init__(
        self, buckets: Iterable[Sequence[torch.Tensor]], names: Mapping[int, str] | None = None
    ) -> None:
        """buckets: the running sums of each. names: of the sums, by address, for profiles."""
        self._names = names or {}
        self._known = {_key(sums): FlatBucket(sums) for sums in buckets}
        self._started: dict[_Key, FlatBucket | ScatteredBucket] = {}
        self._in_memory: SharedSums | None = None
        self._parameters: SharedParameters | None = None
        self._gathers: list[SharesUnderWay] = []
        self._together = False
        self.waited = (0, 0.0)

    @property
    def settled(self) -> bool:
        """Whether the ranks have found out which buckets they share in memory."""
        return self._in_memory is not None

    def in_memory(self, sums: Sequence[torch.Tensor]) -> bool:
        """Whether every rank reaches this bucket on every other."""
        return self._known[_key(sums)].shared is not None

    def gathers_in_memory(self, names: Sequence[str]) -> bool:
        """Whether new values of these parameters go through memory."""
        return self._parameters is not None and self._parameters.holds(names)

    def share(
        self,
        line: Line,
        buckets: Sequence[Sequence[torch.Tensor]],
        gathered: Mapping[str, torch.Tensor] | None = None,
    ) -> int:
        """Finds which of these buckets every rank reaches on every other; all ranks ask together. How many they are.

        line: with a group. buckets: the sums of each, the same ones on all ranks. gathered: parameters whose new values
        go through memory, too, if that is reached.
        """
        assert line.group is not None
        mine, room = [self._known[_key(sums)] for sums in buckets], PiecesRoom(gathered or {})
        *found, new = find_shared(line, [*(bucket.flat for bucket in mine), room.flat])
        for bucket, shared in zip(mine, found, strict=True):
            bucket.shared = shared
        self._in_memory = SharedSums(line.group.group_name)
        if new is not None:
            self._parameters = SharedParameters(room, new.copies, self._in_memory)
        return sum(bucket.shared is not None for bucket in mine)

    @contextmanager
    def in_use(self, *, together: bool = False) -> Iterator[None]:
        """The two ops, called in this block, are about these buckets.

        together: whether all ranks run the block, so that shared buckets are added up in memory. An inner block leaves
        that as it is. What a program that was cut off has started is forgotten.
        """
        if _IN_USE.get() is self:
            yield
            return
        token, self._together = _IN_USE.set(self), together and self.settled
        try:
            yield
        finally:
            _IN_USE.reset(token)
            self._together = False
            self._forget()

    def _forget(self) -> None:
        for bucket in self._started.values():
            bucket.sent = None
        self._started.clear()
        if self._in_memory is not None:
            self._in_memory.forget()
        self._gathers.clear()
        if self._parameters is not None:
            self._parameters.forget()

    def _named(self, sums: Sequence[torch.Tensor], does: str) -> AbstractContextManager[Any]:
        """A stretch of a profile with the bucket's first parameter, and how many there are; nothing if nobody looks."""
        if not profiler_enabled():
            return nullcontext()
        first = self._names.get(sums[0].data_ptr(), "sums")
        return record_function(f"gradsync_fx bucket of {first} ({len(sums)} sums) {does}")

    def wait_for_all(self) -> None:
        """Waits for whatever has been started."""
        for bucket in list(self._started.values()):
            self.wait(bucket.sums)

    def start(self, sums: Sequence[torch.Tensor], op: str, group: str, wire: torch.dtype) -> None:
        """This rank's terms of a bucket are all in: its reduction starts."""
        key = _key(sums)
        bucket = self._started[key] = self._known.get(key) or FlatBucket(sums)
        shared = bucket.shared if self._together and wire is sums[0].dtype else None
        with self._named(sums, "starts"):
            if shared is not None and self._in_memory is not None:
                self._in_memory.start(shared)
            else:
                bucket.start(op, group, wire)

    def start_pieces(
        self, sums: Sequence[torch.Tensor], group: str, wire: torch.dtype, cuts: Cuts
    ) -> None:
        """Likewise, of a bucket of which each rank has its pieces."""
        bucket = self._started[_key(sums)] = ScatteredBucket(sums, cuts)
        bucket.shared = self._pieces_in_memory(sums, wire, cuts) if self._together else None
        if bucket.shared is not None and self._in_memory is not None:
            self._in_memory.start(bucket.shared)
        else:
            bucket.start(group, wire)

    def _pieces_in_memory(
        self, sums: Sequence[torch.Tensor], wire: torch.dtype, cuts: Cuts
    ) -> SharedPieces | None:
        """None where the sums are not all in one bucket that is shared."""
        wanted = {total.data_ptr() for total in sums}
        for bucket in self._known.values():
            if bucket.shared is None or not wanted <= {total.data_ptr() for total in bucket.sums}:
                continue
            assert bucket.flat is not None
            begins = [(t.data_ptr() - bucket.flat.data_ptr()) // t.itemsize for t in sums]
            ends = zip(begins, cuts.bounds, strict=True)
            places = [(b + of[cuts.rank], b + of[cuts.rank + 1]) for b, of in ends]
            return SharedPieces(bucket.shared.copies, cuts.rank, tuple(places), wire)
        return None

    def gather(
        self,
        names: Sequence[str],
        parameters: Sequence[torch.Tensor],
        pieces: Sequence[torch.Tensor],
        group: str,
        cuts: Cuts,
    ) -> None:
        """The new values of some parameters, of which each rank has its pieces, go to all ranks."""
        if self._together and self._parameters is not None and self.gathers_in_memory(names):
            self._parameters.put(names, parameters, pieces, cuts)
        else:
            sent = scattered_bucket.gather_shares(parameters, pieces, group, cuts)
            self._gathers.append(sent)

    def end_gathers(self) -> None:
        """From here on parameters that are gathered have their new values."""
        for sent in self._gathers:
            sent.wait()
        self._gathers.clear()
        if self._parameters is not None:
            self._parameters.take()

    def wait(self, sums: Sequence[torch.Tensor]) -> None:
        """From here on these sums are reduced."""
        bucket, start = self._started.pop(_key(sums)), time.perf_counter()
        with self._named(sums, "is waited for"):
            if bucket.sent is not None:
                bucket.wait()
            else:
                assert self._in_memory is not None
                assert bucket.shared is not None
                self._in_memory.wait(bucket.shared)
        waits, seconds = self.waited
        self.waited = waits + 1, seconds + time.perf_counter() - start


_IN_USE: ContextVar[FlatBuckets | None] = ContextVar("gradsync_fx buckets", default=None)


def buckets_in_use() -> FlatBuckets:
    """Those of the captured step that runs here."""
    buckets = _IN_USE.get()
    if buckets is None:
        raise RuntimeError("a program of gradsync_fx reduces its sums only in a call of its step")
    return buckets
