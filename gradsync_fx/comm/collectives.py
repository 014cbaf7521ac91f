"""The collectives that stay in a step: ranks that have other ones, or no data for them, are found before they hang.

Each rank says a number for its own whenever ranks meet anyway. Only where these differ are the collectives themselves
told, once: groups of other ranks have their own, and a size that is not fixed fits any.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import zip_longest
from typing import Any

import torch.distributed as dist
from torch.fx import Node

from gradsync_fx._torch import group_of_name
from gradsync_fx.comm.rendezvous import Line, Meeting
from gradsync_fx.errors import RanksDisagreeError
from gradsync_fx.ir.ops import argument, node_line
from gradsync_fx.ir.regions import Regions


@dataclass(frozen=True, slots=True)
class Remaining:
    """One collective of a step: what it is, the ranks of its group, its elements ("?": not fixed), its line."""

    kind: str
    group: tuple[int, ...]
    dtype: str
    size: str
    line: str

    def fits(self, other: Remaining) -> bool:
        sizes = {self.size, other.size}
        alike = (self.kind, self.dtype) == (other.kind, other.dtype)
        return alike and (len(sizes) == 1 or "?" in sizes)

    def __str__(self) -> str:
        return f"{self.kind} of {self.size} x {self.dtype} at {self.line}"


@dataclass(frozen=True, slots=True)
class OwnCollectives:
    """Those of one captured step, in the order in which they run.

    number: 0 for none; equal on two ranks where all is equal but the lines. each_call: how many any micro-step runs
    that no tail does; at_end: how many more of these the call runs that closes the window.
    """

    told: tuple[Remaining, ...] = ()
    number: int = 0
    each_call: int = 0
    at_end: int = 0

    @classmethod
    def of(cls, regions: Regions) -> OwnCollectives:
        if not regions.collectives:
            return cls()
        told = tuple(_described(node) for node in regions.collectives)
        text = repr([(r.kind, r.group, r.dtype, r.size) for r in told])
        late = [c for c, waits_for in regions.collectives.items() if waits_for]
        return cls(
            told,
            zlib.crc32(text.encode()) or 1,
            each_call=len(told) - len(late),
            at_end=sum(c not in regions.tail_collectives for c in late),
        )

    @classmethod
    def unseen(cls, line: str) -> OwnCollectives:
        """Of a step that runs eagerly, at this line: that it has some is all that is known."""
        return cls((Remaining("a collective", (), "?", "?", line),), 1, each_call=1)

    def bound(self, *, closes: bool) -> int:
        """How many of a call's need its data."""
        return self.each_call + (self.at_end if closes else 0)


class Agreement:
    """What ranks were found to agree on, so that they speak of it once."""

    def __init__(self) -> None:
        self._agreed: set[tuple[int, ...]] = set()

    def check(self, line: Line, meeting: Meeting, mine: OwnCollectives) -> None:
        """Raises `RanksDisagreeError`, on every rank, where the calls that met do not hold the same collectives.

        Or where some ranks have no data for a call in which the others wait for them.
        """
        running = [rank for rank, p in enumerate(meeting.ranks) if p.runs]
        apart = len(running) < len(meeting.ranks) and any(p.bound for p in meeting.ranks)
        prints = tuple(p.collectives if p.runs else -1 for p in meeting.ranks)
        if not apart and (len(set(prints) - {-1}) <= 1 or prints in self._agreed):
            return
        told = [_read(text) for text in line.texts(_written(mine.told))]
        if apart:
            raise _no_data([r for r in range(len(told)) if r not in running], told, running[0])
        _compare({rank: told[rank] for rank in running})
        self._agreed.add(prints)


def _described(node: Node) -> Remaining:
    target: Any = node.target
    named = (
        dict(zip((a.name for a in target._schema.arguments), node.args, strict=False)) | node.kwargs
    )
    given = argument(node, 0)
    tensors = [n.meta["val"] for n in (given if isinstance(given, list | tuple) else [given])]
    kind = str(node.target).split(".")[1]
    sizes = [t.numel() for t in tensors]
    free = kind.startswith("all_to_all") or any(type(n) is not int for n in sizes)
    op = named.get("reduce_op")
    name: Any = named["group_name"]
    return Remaining(
        kind=f"{kind} ({op})" if op else kind,
        group=tuple(dist.get_process_group_ranks(group_of_name(name))),
        dtype=", ".join(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
        size="?" if free else "+".join(map(str, sizes)),
        line=node_line(node),
    )


def _written(mine: Sequence[Remaining]) -> str:
    return json.dumps([dist.get_rank(), [asdict(r) for r in mine]])


def _read(text: str) -> tuple[int, list[Remaining]]:
    rank, held = json.loads(text)
    return rank, [Remaining(**{**r, "group": tuple(r["group"])}) for r in held]


def _compare(told: dict[int, tuple[int, list[Remaining]]]) -> None:
    groups = dict.fromkeys(r.group for _, held in told.values() for r in held)
    for group in groups:
        members = {
            rank: [r for r in held if r.group == group]
            for rank, (place, held) in told.items()
            if place in group
        }
        for place, row in enumerate(zip_longest(*members.values())):
            at = dict(zip(members, row, strict=True))
            first = next(r for r in row if r is not None)
            odd = [rank for rank, r in at.items() if r is None or not r.fits(first)]
            if odd:
                raise _differ(place, at, odd)


def _differ(place: int, at: dict[int, Remaining | None], odd: list[int]) -> RanksDisagreeError:
    seen = ", ".join(f"rank {rank} has {r or 'none'}" for rank, r in at.items())
    return RanksDisagreeError(
        f"collective {place + 1} of the step, on ranks {odd}",
        seen=seen,
        wanted="the same collectives, in the same order, in the same call of the step on all ranks of a group",
        fix="call it on every rank, outside of any branch on the rank or on the data; its result may be used on one",
    )


def _no_data(
    missing: list[int], told: list[tuple[int, list[Remaining]]], runs: int
) -> RanksDisagreeError:
    first = told[runs][1][0]
    return RanksDisagreeError(
        f"{first.kind}, at {first.line}",
        seen=f"rank {runs} has data for this call, and ranks {missing} have none: in eager PyTorch it would wait for "
        "them for ever",
        wanted="data on all ranks in each call of a step that holds a collective of its own",
        fix="give every rank the same number of calls (torch.utils.data.DistributedSampler does), or take the "
        "collective out of the step",
    )
