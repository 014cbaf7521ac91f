"""What ranks tell each other outside of the programs: where they stand, and that their copies are equal.

Nothing here runs in an accumulate call.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx._torch import all_gather_single
from gradsync_fx.errors import RanksDisagreeError, ReplicaMismatchError


BOUNDARY, FLUSH = 0, 1


@dataclass(frozen=True, slots=True)
class Position:
    """What one rank says at a boundary. `pending` and `summed` include the call that closes the window."""

    kind: int
    k: int
    pending: int
    summed: int
    optimizer_step: int
    layout: int
    discards: int


def _device(group: ProcessGroup) -> torch.device:
    return torch.device("cpu") if "gloo" in dist.get_backend(group) else torch.device("cuda")


def _gather(group: ProcessGroup, values: Sequence[int]) -> list[list[int]]:
    mine = torch.tensor(values, dtype=torch.int64, device=_device(group))
    world = dist.get_world_size(group)
    everyone = torch.empty(world * len(values), dtype=torch.int64, device=mine.device)
    all_gather_single(everyone, mine, group=group)
    return everyone.view(world, len(values)).tolist()


def exchange(group: ProcessGroup | None, mine: Position) -> list[Position]:
    """Every rank's position, in rank order. Raises `RanksDisagreeError`, on every rank, when windows differ."""
    if group is None:
        return [mine]
    numbers = [
        mine.kind,
        mine.k,
        mine.pending,
        mine.summed,
        mine.optimizer_step,
        mine.layout,
        mine.discards,
    ]
    everyone = [Position(*row) for row in _gather(group, numbers)]
    steppers = [(r, p) for r, p in enumerate(everyone) if p.kind == BOUNDARY]
    if len({(p.k, p.pending) for _, p in steppers}) > 1:
        raise _disagree(everyone, "the window", lambda p: f"micro-step {p.pending}/{p.k}")
    if len({p.discards for p in everyone}) > 1:
        raise _disagree(everyone, "the windows", lambda p: f"{p.discards} discarded windows")
    if len({p.layout for p in everyone}) > 1:
        raise _disagree(everyone, "the gradients", lambda p: f"bucket layout {p.layout:#x}")
    if len({p.optimizer_step for p in everyone}) > 1:
        raise _disagree(everyone, "the updates", lambda p: f"update {p.optimizer_step}")
    return everyone


def _disagree(everyone: list[Position], what: str, show: object) -> RanksDisagreeError:
    assert callable(show)
    texts = [show(p) for p in everyone]
    common = max(texts, key=texts.count)  # rank 0's on a tie, on every rank alike
    odd = [r for r, t in enumerate(texts) if t != common] or [0]
    other = texts.index(common)
    told = ", ".join(f"rank {r} is at {texts[r]}" for r in odd)
    return RanksDisagreeError(
        f"{what} of ranks {odd}",
        seen=f"{told} while rank {other} is at {common}",
        wanted="all ranks at the same place of the window when it closes",
        fix="give every rank the same number of calls and the same k; use step.skip() or step.flush() where a rank "
        "has less data",
    )


def check_replicas(group: ProcessGroup, tensors: dict[str, torch.Tensor]) -> None:
    """Raises `ReplicaMismatchError` naming the first parameter whose bytes differ between ranks."""
    sums = [_checksum(t) for t in tensors.values()]
    rows = _gather(group, [len(sums), *sums])
    for i, name in enumerate(tensors):
        for rank, row in enumerate(rows):
            if row[i + 1] != rows[0][i + 1]:
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
    """Rank 0's values everywhere (rank 0 of the group)."""
    source = dist.get_global_rank(group, 0)
    for work in [dist.broadcast(t, source, group=group, async_op=True) for t in tensors]:
        work.wait()
