"""The error for a rank that is gone, in place of what torch says when a connection breaks or a wait ends."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from types import TracebackType

import torch.distributed as dist

from gradsync_fx.errors import RankLostError


# gloo raises plain RuntimeErrors; it names its own source file, or one of these.
_GLOO = re.compile(r"gloo/|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out waiting")


def lost(seen: str, where: str, absent: Sequence[int] = ()) -> RankLostError:
    """where: this rank, and its position in the window. absent: the ranks that are missing, where that is known."""
    return RankLostError(
        named(absent) or "the other ranks",
        seen=f"{seen}; {where}" if where else seen,
        wanted="all ranks at the same collective within the timeout",
        fix="see whether a rank was killed, raised, ended, or made fewer calls (step.flush() is for a rank whose data "
        "ended); the process group cannot be used further: restart all ranks from the last saved state",
    )


def named(ranks: Sequence[int]) -> str:
    return ", ".join(f"rank {rank}" for rank in ranks)


def waited(where: str, absent: Sequence[int]) -> str:
    """What a rank that gives up leaves for those that come later."""
    return f"{where} and waited for {named(absent)}" if absent else where


def broken(failure: BaseException) -> str:
    """What a broken connection, or a wait that ended, looks like from here."""
    said = (str(failure).strip().splitlines() or [type(failure).__name__])[0].partition(". ")[0]
    return f"the connection broke, or there was no answer in time ({said})"


def is_of_connection(failure: BaseException) -> bool:
    """Whether torch raises this where a connection broke, or a wait ended."""
    said = isinstance(failure, RuntimeError) and _GLOO.search(str(failure)) is not None
    return said or isinstance(failure, dist.DistError)


class NamedLosses:
    """Blocks in which torch's errors of a broken connection become a `RankLostError`; theirs is the cause.

    where, absent: as in `lost`, asked when it happens.
    """

    def __init__(self, where: Callable[[], str], absent: Callable[[], Sequence[int]]) -> None:
        self._where, self._absent = where, absent

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if failure is not None and is_of_connection(failure):
            raise lost(broken(failure), self._where(), self._absent()) from failure
