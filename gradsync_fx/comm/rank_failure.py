"""The error for a rank that is gone, in place of what torch says when a connection breaks or a wait ends."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import torch.distributed as dist

from gradsync_fx.errors import RankLostError


# Where NCCL's flight recorder writes to, by torch's variables and without them; and what switches it on.
_RECORDS = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
_NAMES = ("comm_lib_trace_rank_", "nccl_trace_rank_")
_BUFFERS = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")
_STARTED = time.time()
# gloo raises plain RuntimeErrors; it names its own source file, or one of these.
_GLOO = re.compile(r"gloo/|Connection (closed|reset|refused)|Broken pipe|[Tt]imed out waiting")


def lost(seen: str, where: str, absent: Sequence[int] = ()) -> RankLostError:
    """where: this rank, and its position in the window. absent: the ranks that are missing, where that is known."""
    record = flight_record()
    return RankLostError(
        named(absent) or "the other ranks",
        seen=f"{seen}; {where}" if where else seen,
        wanted="all ranks at the same collective within the timeout",
        fix=f"{record}see whether a rank was killed, raised, ended, or made fewer calls (step.flush() is for a rank "
        "whose data ended); the process group cannot be used further: restart all ranks from the last saved state",
    )


def flight_record() -> str:
    """Where NCCL wrote down its collectives, or will when its own timeout ends; "" where there is nothing of the kind.

    `python -m torch.distributed.flight_recorder` reads what all ranks wrote.
    """
    given, cache = _setting(*_RECORDS), _setting("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    places = [given] if given else [os.path.join(cache, "torch", name) for name in _NAMES]
    rank = dist.get_rank() if dist.is_initialized() else 0
    for prefix in places:
        file = f"{prefix}{rank}"
        if os.path.exists(file) and os.path.getmtime(file) >= _STARTED:
            return f"read NCCL's flight record in {file}, and those of the other ranks beside it; "
    if _setting(*_BUFFERS) not in ("", "0") and _uses_nccl():
        return f"NCCL writes its flight record to {places[0]}<rank> when its own timeout ends; "
    return ""


def _setting(*names: str) -> str:
    """NCCL's, which torch reads there; the first of these that is set."""
    held = os.environ
    return next((held[name] for name in names if held.get(name)), "")


def _uses_nccl() -> bool:
    return dist.is_initialized() and "nccl" in dist.get_backend_config()


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
