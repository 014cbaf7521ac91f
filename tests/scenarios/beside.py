"""Ranks of a group that runs nothing on the host, as NCCL's do: a stand-in, for CUDA alone, that sends nothing."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup
from torch.distributed import ProcessGroup

from gradsync_fx.comm.rendezvous import BOUNDARY, Line, Position, check_same_window
from gradsync_fx.errors import GradSyncError


def make(store: Any, rank: int, world: int, timeout: Any) -> Any:
    """Has no answer for a tensor of the CPU."""
    return FakeProcessGroup._create_internal(rank, world)


def register() -> None:
    if not hasattr(dist.Backend, "ON_DEVICE"):
        dist.Backend.register_backend("on_device", make, devices=["cuda"])


def group() -> ProcessGroup:
    register()
    made = dist.new_group(backend="cuda:on_device")
    assert isinstance(made, ProcessGroup)
    return made


def meet(rank: int) -> dict[str, Any]:
    """Every rank's numbers, in rank order."""
    line = Line(group(), 5.0)
    rows = [line.gather([float(rank), 0.5]) for _ in range(3)]
    assert rows[0] == rows[1] == rows[2]
    return {"rows": rows[0], "rank": line.rank}


def late(rank: int) -> str:
    """Rank 1 does not come; rank 0 waits for as long as it was told to."""
    line = Line(group(), 2.0)
    line.gather([0.0])
    if rank:
        dist.barrier()
        return ""
    try:
        line.gather([1.0], where="rank 0 is at micro-step 2/2")
    except GradSyncError as lost:
        return f"{type(lost).__name__} {lost}"
    finally:
        dist.barrier()
    return "nothing was raised"


def disagree(rank: int) -> str:
    """Windows of other lengths."""
    line = Line(group(), 5.0)
    names = dict.fromkeys(Position.__slots__, 0)
    mine = Position(
        **{
            **names,
            "kind": BOUNDARY,
            "k": 2 + rank,
            "pending": 2,
            "weights": (1.0,),
            "updates": (0.0,),
        }
    )  # type: ignore[arg-type]
    try:
        check_same_window(line.meet(mine))
    except GradSyncError as differ:
        return f"{type(differ).__name__} {differ}"
    return "nothing was raised"
