"""What ranks tell each other outside of the programs: where they stand, and that their copies are equal.

Nothing here runs in an accumulate call, unless that call has collectives anyway (sync_each_batch, buffers "every").
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx._torch import all_gather_single
from gradsync_fx.errors import RanksDisagreeError, ReplicaMismatchError
from gradsync_fx.presence import give_up, someone_compiles, who_gave_up


ACCUMULATE, BOUNDARY, FLUSH = 0, 1, 2
EAGER = -1  # layout of a rank whose step was not captured


@dataclass(frozen=True, slots=True)
class Position:
    """What one rank says when ranks meet.

    kind: of its call. runs: whether it has data for it. k: 0 where the step decides. pending: micro-steps of the
    window, this call included. closing: the parts that the call closes, as bits. layout: of its buckets; 0 where no
    one layout holds the window's gradients, `EAGER` where the step runs eagerly. weights: of each part's terms on this
    rank; where weights are known only when a micro-step has run, without this call's.
    """

    kind: int
    runs: int
    k: int
    pending: int
    closing: int
    optimizer_step: int
    layout: int
    discards: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Meeting:
    """All ranks' positions, and what follows from them; the same on every rank."""

    ranks: list[Position]

    @property
    def kind(self) -> int:
        """ACCUMULATE where calls that close nothing met (ranks that flush keep them company), else BOUNDARY."""
        return ACCUMULATE if any(p.kind == ACCUMULATE for p in self.ranks) else BOUNDARY

    @property
    def over(self) -> bool:
        """Whether every rank's data has ended."""
        return all(p.kind == FLUSH for p in self.ranks)

    @property
    def someone_runs(self) -> bool:
        return any(p.runs for p in self.ranks)

    @property
    def uniform(self) -> bool:
        """Whether all ranks have the same gradients to reduce, in the same order."""
        return len({p.layout for p in self.ranks}) == 1 and self.ranks[0].layout > 0

    @property
    def closing(self) -> frozenset[int]:
        """The parts that the calls close; all parts where every rank flushes."""
        bits = next((p.closing for p in self.ranks if p.kind != FLUSH), -1)
        return frozenset(i for i in range(len(self.ranks[0].weights)) if bits >> i & 1)

    @property
    def pending(self) -> int:
        return max(p.pending for p in self.ranks)


@dataclass(frozen=True, slots=True)
class Line:
    """How one rank reaches the others: the group (None: it is alone), and how long it waits for them."""

    group: ProcessGroup | None
    timeout: float | None

    def gather(self, values: Sequence[float], *, where: str = "") -> list[list[float]]:
        """Every rank's numbers, in rank order. float64: integers are exact up to 2**53."""
        if self.group is None:
            return [list(values)]
        mine = torch.tensor(values, dtype=torch.float64, device=_device(self.group))
        world = dist.get_world_size(self.group)
        everyone = torch.empty(world * len(values), dtype=torch.float64, device=mine.device)
        work = all_gather_single(everyone, mine, group=self.group, async_op=True)
        self._wait(work, where)
        return everyone.view(world, len(values)).tolist()

    def _wait(self, work: dist.Work, where: str) -> None:
        if self.timeout is None or self.group is None:
            work.wait()
            return
        name, end = self.group.group_name, time.monotonic() + self.timeout
        while True:
            try:
                work.wait(timedelta(seconds=min(1.0, self.timeout / 10)))
                break
            except RuntimeError as failure:
                if someone_compiles():
                    end = time.monotonic() + self.timeout
                elif time.monotonic() >= end or work.is_completed():
                    give_up(name, where)
                    waited = f"not all came within {self.timeout:g} s, and none was compiling"
                    raise _gone(f"{waited}; {where}") from failure
        early = who_gave_up(name)
        if early is not None:
            raise _gone(f"{early}, when it gave up waiting for this one; {where}")

    def names(self, mine: Sequence[str]) -> list[str]:
        """All names of all ranks, sorted."""
        if self.group is None:
            return sorted(set(mine))
        text = "\0".join(mine).encode()
        longest = int(max(row[0] for row in self.gather([len(text)])))
        rows = self.gather([*text, *([-1] * (longest - len(text)))])
        found = {
            name
            for row in rows
            for name in bytes(int(b) for b in row if b >= 0).decode().split("\0")
        }
        return sorted(found - {""})

    def meet(self, mine: Position) -> Meeting:
        """Every rank's position. Raises `RanksDisagreeError`, on every rank, when windows differ."""
        fixed = [mine.kind, mine.runs, mine.k, mine.pending, mine.closing, mine.optimizer_step]
        numbers = [*fixed, mine.layout, mine.discards, *mine.weights]
        place = f"micro-step {mine.pending}/{mine.k or '?'} of update {mine.optimizer_step + 1}"
        where = f"rank {_rank(self.group)} is at {place}"
        rows = self.gather(numbers, where=where)
        everyone = [_position(row) for row in rows]
        if self.group is not None:
            _check(everyone)
        return Meeting(everyone)


def _position(row: list[float]) -> Position:
    kind, runs, k, pending, closing, update, layout, discards = (int(v) for v in row[:8])
    return Position(kind, runs, k, pending, closing, update, layout, discards, tuple(row[8:]))


def _check(everyone: list[Position]) -> None:
    calls = [p for p in everyone if p.kind != FLUSH]
    counted = [p for p in calls if p.k]
    if len({p.k for p in calls}) > 1 or len({p.pending for p in counted}) > 1:
        raise _disagree(everyone, "the window", lambda p: f"micro-step {p.pending}/{p.k or '?'}")
    if len({(p.kind, p.closing) for p in calls}) > 1:
        raise _disagree(everyone, "the window", lambda p: CALLS[p.kind])
    if len({p.layout == EAGER for p in everyone}) > 1:
        raise _disagree(
            everyone,
            "the steps",
            lambda p: "an eager step" if p.layout == EAGER else "a captured step",
            fix='call the same step on every rank; on_unsupported="error" names what kept it from being captured',
        )
    if len({p.discards for p in everyone}) > 1:
        raise _disagree(everyone, "the windows", lambda p: f"{p.discards} discarded windows")
    if len({p.optimizer_step for p in everyone}) > 1:
        raise _disagree(everyone, "the updates", lambda p: f"update {p.optimizer_step}")


CALLS = {ACCUMULATE: "an accumulate call", BOUNDARY: "a boundary", FLUSH: "a flush"}


def check_same_layout(meeting: Meeting) -> None:
    """For calls that reduce in every micro-step. Raises `RanksDisagreeError` when ranks have other gradients."""
    if len({p.layout for p in meeting.ranks}) > 1:
        raise _disagree(
            meeting.ranks,
            "the gradients",
            lambda p: f"bucket layout {p.layout:#x}",
            fix="with sync_each_batch=True all ranks take the same branch of the step at each call; without it, each "
            "may take its own",
        )


def _gone(seen: str) -> RanksDisagreeError:
    return RanksDisagreeError(
        "the other ranks",
        seen=seen,
        wanted="all ranks at the boundary within rank_timeout",
        fix="see whether a rank raised, ended, or made fewer calls (step.flush() is for a rank whose data ended); the "
        "process group cannot be used further: restart from the last saved state",
    )


def _disagree(
    everyone: list[Position], what: str, show: Callable[[Position], str], fix: str = ""
) -> RanksDisagreeError:
    texts = [show(p) for p in everyone]
    common = max(texts, key=texts.count)  # rank 0's on a tie, on every rank alike
    odd = [r for r, t in enumerate(texts) if t != common] or [0]
    other = texts.index(common)
    told = ", ".join(f"rank {r} is at {texts[r]}" for r in odd)
    return RanksDisagreeError(
        f"{what} of ranks {odd}",
        seen=f"{told} while rank {other} is at {common}",
        wanted="all ranks at the same place of the window when it closes",
        fix=fix
        or "give every rank the same number of calls and the same k; use step.skip() or step.flush() where a rank has "
        "less data",
    )


def _rank(group: ProcessGroup | None) -> int:
    return 0 if group is None else dist.get_rank(group)


def _device(group: ProcessGroup) -> torch.device:
    return torch.device("cpu") if "gloo" in dist.get_backend(group) else torch.device("cuda")


FIRST = "at its first call"


def check_replicas(line: Line, tensors: dict[str, torch.Tensor]) -> None:
    """Raises `ReplicaMismatchError` naming the first parameter whose bytes differ between ranks."""
    counts = [int(row[0]) for row in line.gather([len(tensors)], where=FIRST)]
    if len(set(counts)) > 1:
        raise ReplicaMismatchError(
            "the model",
            seen=", ".join(f"rank {r} has {n} parameters" for r, n in enumerate(counts)),
            wanted="equal copies of the model on all ranks",
            fix="build the same model on every rank",
        )
    sums = [_checksum(t) for t in tensors.values()]
    rows = line.gather(sums, where=FIRST)
    for i, name in enumerate(tensors):
        for rank, row in enumerate(rows):
            if row[i] != rows[0][i]:
                raise ReplicaMismatchError(
                    f"parameter {name!r}",
                    seen=f"rank {rank} starts with other values than rank 0",
                    wanted="equal copies of the model on all ranks",
                    fix="seed all ranks alike before the model is built, load the same weights, or wrap it in DDP",
                )


def _checksum(tensor: torch.Tensor) -> int:
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8).cpu()
    return zlib.crc32(flat.numpy().tobytes())


def broadcast(group: ProcessGroup, tensors: list[torch.Tensor]) -> None:
    """Rank 0's values everywhere (rank 0 of the group); tensors of one dtype and device travel as one."""
    source = dist.get_global_rank(group, 0)
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for some in alike.values():
        flat = torch.cat([t.reshape(-1) for t in some])
        dist.broadcast(flat, source, group=group)
        for tensor, value in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(value.view(tensor.shape))
