"""Whether there are other ranks, and what they write for all to read: that they compile, wait, gave up waiting.

A rank writes that it waits only when it has waited for long, or fails: calls in which all goes well write nothing.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx._torch import default_store


def in_job(group: ProcessGroup | None = None) -> tuple[int, int] | None:
    """This process' rank and the number of ranks, in a group or in all of the job; None outside of any job."""
    if not (dist.is_available() and dist.is_initialized()):
        return None
    return dist.get_rank(group), dist.get_world_size(group)


def _key(rank: int) -> str:
    return f"gradsync_fx/compiling/{rank}"


# Compilations of this process, by number; those that run now, in all of its threads.
_numbers = itertools.count(1)
_running: set[int] = set()
_turn = threading.Lock()


@contextmanager
def compiling(rank_timeout: float | None) -> Iterator[None]:
    """This rank compiles inside the block. Without a `rank_timeout` nobody asks, and nothing is written."""
    place = in_job()
    if rank_timeout is None or place is None:
        yield
        return
    number = next(_numbers)
    with _turn:
        _running.add(number)
        _tell(place[0])
    try:
        yield
    finally:
        with _turn:
            _running.discard(number)
            _tell(place[0])


def _tell(rank: int) -> None:
    """Writes down the oldest compilation that runs: a waiting rank sees whether it is still the same one."""
    default_store().set(_key(rank), str(min(_running, default="")))


class Compilations:
    """What a waiting rank sees of the others' compilations, over the time that it waits."""

    LONGEST = 1800.0  # seconds for one program, after which a rank counts as late like any other

    def __init__(self) -> None:
        self._since: dict[tuple[int, str], float] = {}

    def run(self) -> bool:
        """Whether a rank of the job is compiling, for no longer than `LONGEST` seconds under this one's eyes.

        One that was killed while it did never says that it ended, nor does one that hangs.
        """
        now, found = time.monotonic(), False
        for rank in range(dist.get_world_size()):
            number = _read(_key(rank))
            if number:
                since = self._since.setdefault((rank, number), now)
                found |= now - since < self.LONGEST
        return found

    def hanging(self) -> list[int]:
        """The ranks whose compilation has taken longer than that."""
        now = time.monotonic()
        held = [(r, n) for (r, n), t in self._since.items() if now - t >= self.LONGEST]
        return [rank for rank, number in held if _read(_key(rank)) == number]


# Meetings so far, by group: on all ranks of a group they are the same ones.
_meetings: Counter[str] = Counter()
PATIENCE = 3.0  # seconds for the others to notice, too, that something is wrong


def next_meeting(group: str) -> None:
    """The ranks of a group come together once more."""
    _meetings[group] += 1


def wait_here(group: ProcessGroup, *, behind: bool = False) -> float:
    """This rank came to the meeting, and waits; behind: it has been there, and waits in what follows."""
    name, rank = group.group_name, dist.get_rank(group)
    place = _meetings[name] + behind / 2
    with suppress(RuntimeError):
        default_store().set(_place(name, rank), str(place))
    return place


def find_absent(group: ProcessGroup, *, behind: bool = False) -> list[int]:
    """The ranks of a group that did not come to where this one waits; none where nobody can tell.

    One that waits itself says so a moment after it came: the others are looked for until one is left, or for a while.
    """
    place, end = wait_here(group, behind=behind), time.monotonic() + PATIENCE
    while True:
        absent = _absent(group, place)
        if len(absent) <= 1 or time.monotonic() >= end:
            return absent
        time.sleep(0.1)


def _absent(group: ProcessGroup, place: float) -> list[int]:
    name, world = group.group_name, dist.get_world_size(group)
    seen = [float(_read(_place(name, rank)) or -1) for rank in range(world)]
    if seen[dist.get_rank(group)] < 0:
        return []  # what this rank wrote cannot be read: the store is gone
    return [rank for rank, reached in enumerate(seen) if reached < place]


def _place(group: str, rank: int) -> str:
    return f"gradsync_fx/waits/{group}/{rank}"


def give_up(group: str, where: str) -> None:
    """This rank waits no longer: whoever comes later must not start what it will not finish."""
    with suppress(RuntimeError):
        default_store().set(f"gradsync_fx/gave_up/{group}", where)


def who_gave_up(group: str) -> str | None:
    """What the rank said that gave up, or None."""
    return _read(f"gradsync_fx/gave_up/{group}")


def _read(key: str) -> str | None:
    """What stands there; None where nothing does, or where the process that kept the store is gone."""
    store = default_store()
    try:
        return store.get(key).decode() if store.check([key]) else None
    except RuntimeError:
        return None
