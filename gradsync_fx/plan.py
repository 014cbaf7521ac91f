"""What every pass is given: the arithmetic of one captured step's window, and the tensors that it binds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gradsync_fx.optimizer_trace import Update
from gradsync_fx.program import Step
from gradsync_fx.regions import Regions


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one leaf's accumulated gradient becomes the window's.

    op, group: of the all-reduce; group None: no all-reduce. divisor: which host scalar it is divided by afterwards
    ("ranks": terms of all ranks; "local": the same over the number of ranks, for gradients that the user's own code
    averages).
    """

    op: str
    group: str | None
    divisor: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Leaves that share one all-reduce, by leaf number, in the order in which their gradients become ready."""

    leaves: tuple[int, ...]
    reduction: Reduction


@dataclass(slots=True)
class Plan:
    """All that passes need to know about one captured step."""

    step: Step
    regions: Regions
    buckets: tuple[Bucket, ...]
    accumulators: dict[str, torch.Tensor]
    updates: dict[str, Update]
    state_tensors: dict[str, list[torch.Tensor]]
    wire_dtype: torch.dtype | None
    sync_each_batch: bool
