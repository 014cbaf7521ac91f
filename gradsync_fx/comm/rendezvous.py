"""What ranks tell each other outside of the programs: where they stand. It is said on the host, also where gradients
are reduced on another device, so that nobody waits for what runs there.

Nothing here runs in an accumulate call, unless that call has collectives anyway (sync_each_batch, buffers "every").
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx._torch import all_gather_single
from gradsync_fx.comm.host_group import backend_of, host_group, in_order_of
from gradsync_fx.comm.liveness import (
    Compilations,
    find_absent,
    give_up,
    next_meeting,
    wait_here,
    who_gave_up,
)
from gradsync_fx.comm.rank_failure import broken, lost, waited
from gradsync_fx.errors import RanksDisagreeError
from gradsync_fx.wording import number_of


ACCUMULATE, BOUNDARY, FLUSH, SAVING = 0, 1, 2, 3
EAGER = -1  # layout of a rank whose step was not captured


@dataclass(frozen=True, slots=True)
class Position:
    """What one rank says when ranks meet.

    kind: of its call. runs: whether it has data for it. k: 0 where the step decides. pending: micro-steps of the
    window, this call included. closing: the parts that the call closes, as bits. layout: of its buckets; 0 where no
    one layout holds the window's gradients, `EAGER` where the step runs eagerly. certain: whether each gradient in
    these buckets has a term that counts. settled: whether it knows which of the buckets lie in memory that all
    ranks reach. collectives: a number for those of the step itself (collectives.py). bound: how many of these this
    call runs that need its data. fed: its micro-steps with data in the open window, this call included. buffers:
    a number for the module buffers that it sends or takes. weights: of each part's terms on this rank; where weights
    are known only when a micro-step has run, without this call's. masks: whether its boundary program sees by itself
    whether a term counted; then it waited for no weight, and tells none. updates: a number for those of each part that
    closes, where they are shared out among the ranks; else 0. stop: whether it was asked to stop.
    """

    kind: int
    runs: int
    k: int
    pending: int
    closing: int
    optimizer_step: int
    layout: int
    discards: int
    certain: int
    settled: int
    collectives: int
    bound: int
    fed: int
    buffers: int
    masks: int
    stop: int
    weights: tuple[float, ...]
    updates: tuple[float, ...]


def saving(k: int, pending: int, optimizer_step: int, parts: int) -> Position:
    """Of a rank that saves an optimizer's state, between two calls of its step."""
    here = {"k": k, "pending": pending, "optimizer_step": optimizer_step}
    nothing = dict.fromkeys((field.name for field in fields(Position)), 0)
    by_part = dict.fromkeys(("weights", "updates"), (0.0,) * parts)
    return Position(**{**nothing, **here, **by_part, "kind": SAVING})  # type: ignore[arg-type]


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
    def all_or_none_run(self) -> bool:
        """Whether all ranks have data for this call, or none has: then they run the same program."""
        return len({bool(p.runs) for p in self.ranks}) == 1

    @property
    def uniform(self) -> bool:
        """Whether all ranks have the same gradients to reduce, in the same order."""
        return len({p.layout for p in self.ranks}) == 1 and self.ranks[0].layout > 0

    @property
    def certain(self) -> bool:
        """Whether all ranks have the same gradients to reduce, and each of these is one for sure."""
        return self.uniform and any(p.certain for p in self.ranks)

    @property
    def masked(self) -> bool:
        """Whether all ranks run one program, and learn later whether it made an update."""
        return self.uniform and all(p.masks for p in self.ranks)

    @property
    def closing(self) -> frozenset[int]:
        """The parts that the calls close; all parts where every rank flushes."""
        bits = next((p.closing for p in self.ranks if p.kind != FLUSH), -1)
        return frozenset(i for i in range(len(self.ranks[0].weights)) if bits >> i & 1)

    @property
    def fed(self) -> list[int]:
        """The ranks with data in this window; those whose data has ended only where there is no other."""
        found = [rank for rank, p in enumerate(self.ranks) if p.fed]
        return [rank for rank in found if self.ranks[rank].kind != FLUSH] or found

    @property
    def pending(self) -> int:
        return max(p.pending for p in self.ranks)


@dataclass(frozen=True, slots=True)
class Line:
    """How one rank reaches the others: the group (None: it is alone), and how long it waits for them."""

    group: ProcessGroup | None
    timeout: float | None

    @property
    def rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)

    def gather(self, values: Sequence[float], *, where: str = "") -> list[list[float]]:
        """Every rank's numbers, in rank order. float64: integers are exact up to 2**53."""
        if self.group is None:
            return [list(values)]
        next_meeting(self.group.group_name)
        mine = torch.tensor(values, dtype=torch.float64, device="cpu")
        world, host = dist.get_world_size(self.group), host_group(self.group)
        everyone = torch.empty(world * len(values), dtype=torch.float64, device="cpu")
        work = all_gather_single(everyone, mine, group=host, async_op=True)
        self._wait(work, where)
        rows: list[list[float]] = everyone.view(world, len(values)).tolist()
        return rows if host is self.group else [rows[i] for i in in_order_of(self.group, host)]

    def _wait(self, work: dist.Work, where: str) -> None:
        assert self.group is not None
        name = self.group.group_name
        try:
            if self.timeout is not None or is_gloo(host_group(self.group)):
                self._look_round_until_it_came(work, where)
            work.wait()
        except RuntimeError as failure:
            absent = self.absent()
            give_up(name, waited(where, absent))
            raise lost(broken(failure), where, absent) from failure
        early = who_gave_up(name) if self.timeout is not None else None
        if early is not None:
            raise lost(f"{early}, when it gave up waiting for this one", where)

    def _look_round_until_it_came(self, work: dist.Work, where: str) -> None:
        """In slices: an interrupt is seen between two, and so is what the other ranks wrote down meanwhile."""
        assert self.group is not None
        name, limit = self.group.group_name, math.inf if self.timeout is None else self.timeout
        end, compilations = time.monotonic() + limit, Compilations()
        while not _came_within(work, min(1.0, limit / 10)):
            wait_here(self.group)
            early = who_gave_up(name)
            if early is not None:
                raise lost(f"{early}, when it gave up", where, self.absent())
            if compilations.run():
                end = time.monotonic() + limit
            elif time.monotonic() >= end:
                absent = self.absent()
                give_up(name, waited(where, absent))
                hanging = compilations.hanging()
                why = (
                    f"ranks {hanging} have been compiling for over {compilations.LONGEST:g} s"
                    if hanging
                    else "no rank was compiling"
                )
                raise lost(f"not there within {limit:g} s, and {why}", where, absent)

    def absent(self, *, behind: bool = False) -> list[int]:
        """The ranks that this one waits for in vain, as far as ranks wrote down where they are.

        behind: not in a meeting, but in what follows one.
        """
        return [] if self.group is None else find_absent(self.group, behind=behind)

    def texts(self, mine: str) -> list[str]:
        """Every rank's text, in rank order."""
        sent = mine.encode()
        longest = int(max(row[0] for row in self.gather([len(sent)])))
        rows = self.gather([*sent, *([-1] * (longest + 1 - len(sent)))])
        return [bytes(int(b) for b in row if b >= 0).decode() for row in rows]

    def names(self, mine: Sequence[str]) -> list[str]:
        """All names of all ranks, sorted."""
        if self.group is None:
            return sorted(set(mine))
        found = {name for text in self.texts("\0".join(mine)) for name in text.split("\0")}
        return sorted(found - {""})

    def meet(self, mine: Position) -> Meeting:
        """Every rank's position."""
        fixed = [mine.kind, mine.runs, mine.k, mine.pending, mine.closing, mine.optimizer_step]
        asked = [mine.layout, mine.discards, mine.certain, mine.settled]
        held = [mine.collectives, mine.bound, mine.fed, mine.buffers, mine.masks, mine.stop]
        numbers = [*fixed, *asked, *held, *mine.weights, *mine.updates]
        rows = self.gather(numbers, where=self.place(mine.pending, mine.k, mine.optimizer_step))
        return Meeting([_position(row) for row in rows])

    def place(self, pending: int, k: int, optimizer_step: int) -> str:
        """Where this rank stands, for people."""
        place = f"micro-step {pending}/{k or '?'} of update {optimizer_step + 1}"
        return f"rank {self.rank} is at {place}"


def _position(row: list[float]) -> Position:
    *names, weights, updates = (field.name for field in fields(Position))
    held: dict[str, Any] = dict(zip(names, map(int, row), strict=False))
    parts = (len(row) - len(names)) // 2
    held[weights], held[updates] = tuple(row[len(names) : -parts]), tuple(row[-parts:])
    return Position(**held)


def check_same_window(meeting: Meeting) -> None:
    """Raises `RanksDisagreeError`, on every rank, when windows differ."""
    everyone = meeting.ranks
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
        raise _disagree(
            everyone, "the windows", lambda p: f"{number_of(p.discards, 'discarded window')}"
        )
    if len({p.optimizer_step for p in everyone}) > 1:
        raise _disagree(everyone, "the updates", lambda p: f"update {p.optimizer_step}")


CALLS = {
    ACCUMULATE: "an accumulate call",
    BOUNDARY: "a boundary",
    FLUSH: "a flush",
    SAVING: "optimizer.state_dict()",
}


def check_same_kind(meeting: Meeting) -> None:
    """Raises `RanksDisagreeError`, on every rank, where some save an optimizer's state and others do not."""
    if len({p.kind == SAVING for p in meeting.ranks}) > 1:
        raise _disagree(
            meeting.ranks,
            "the calls",
            lambda p: CALLS[p.kind],
            fix="with shard_optimizer=True every rank calls optimizer.state_dict(), between the same two calls of the "
            "step: it gathers what the ranks hold",
        )


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
        wanted="all ranks at the same position in the window when it closes",
        fix=fix
        or "give every rank the same number of calls and the same k; use step.skip() or step.flush() where a rank has "
        "less data",
    )


def is_gloo(group: ProcessGroup) -> bool:
    """Whether gloo runs its collectives of tensors on the CPU."""
    return backend_of(group, "cpu") == "gloo"


def _came_within(work: dist.Work, seconds: float) -> bool:
    """Whether it ended, well or badly."""
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return work.is_completed()
    return True


def broadcast(group: ProcessGroup, tensors: list[torch.Tensor], rank: int = 0) -> None:
    """One rank's values everywhere (its rank in the group); tensors of one dtype and device are sent as one."""
    source = dist.get_global_rank(group, rank)
    alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        alike.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for some in alike.values():
        flat = torch.cat([t.reshape(-1) for t in some])
        on_host = flat.device.type == "cpu"
        dist.broadcast(flat, source, group=host_group(group) if on_host else group)
        for tensor, value in zip(some, flat.split([t.numel() for t in some]), strict=True):
            tensor.copy_(value.view(tensor.shape))
