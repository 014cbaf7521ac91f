"""Whether there are other ranks, and what ranks write for all to read: that they compile, that they gave up waiting."""

from __future__ import annotations

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


@contextmanager
def compiling(rank_timeout: float | None) -> Iterator[None]:
    """This rank compiles inside the block. Without a `rank_timeout` nobody asks, and nothing is written."""
    place = in_job()
    if rank_timeout is None or place is None:
        yield
        return
    store, key = default_store(), _key(place[0])
    store.set(key, "yes")
    try:
        yield
    finally:
        store.set(key, "no")


def someone_compiles() -> bool:
    """Whether any rank of the job is compiling now. One that was killed while it did never says that it ended."""
    return any(_read(_key(rank)) == "yes" for rank in range(dist.get_world_size()))


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
