"""What a window means, in plain eager PyTorch: one process that has the micro-batches of all ranks.

A script is what one rank does: for each slot a `Slot`, or None for a slot without data; then it flushes. Window n of
all ranks together holds their slots n k to (n + 1) k - 1. Nothing here uses gradsync_fx.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Slot:
    """One micro-batch: made from `seed`, `rows` long, of branch `branch`; `bad` puts a NaN into it."""

    seed: int
    rows: int = 4
    branch: str = "both"
    bad: bool = False

    def batch(self) -> tuple[Tensor, Tensor]:
        source = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.rows, 8, generator=source)
        y = torch.randn(self.rows, 1, generator=source)
        if self.bad:
            x[0, 0] = math.nan
        return x, y


Script = list[Slot | None]
LossOf = Callable[[nn.Module, Tensor, Tensor, str], Tensor]


@dataclass(frozen=True)
class Rules:
    """k, and how a window's gradients combine."""

    k: int
    reduction: Literal["mean", "sum", "weighted"] = "mean"
    skip_nonfinite: bool = False

    def weight(self, slot: Slot) -> float:
        return float(slot.rows) if self.reduction == "weighted" else 1.0


def windows(scripts: Sequence[Script], k: int) -> list[list[Slot]]:
    """The micro-batches of each window, of all ranks together."""
    count = math.ceil(max(len(s) for s in scripts) / k)
    return [
        [slot for s in scripts for slot in s[n * k : (n + 1) * k] if slot is not None]
        for n in range(count)
    ]


def truth(
    model: nn.Module,
    optimizer: Optimizer,
    scripts: Sequence[Script],
    rules: Rules,
    loss_of: LossOf,
    before: Callable[[], object] | None = None,
) -> list[dict[str, Tensor]]:
    """The model after each update. before: called before each update, for clipping."""
    states = []
    for slots in windows(scripts, rules.k):
        slots = [s for s in slots if not (rules.skip_nonfinite and s.bad)]
        total = sum(rules.weight(s) for s in slots)
        if total == 0:
            continue
        divisor = float(len(scripts)) if rules.reduction == "sum" else total
        for slot in slots:
            loss = loss_of(model, *slot.batch(), slot.branch)
            (loss * (rules.weight(slot) / divisor)).backward()
        if before is not None:
            before()
        optimizer.step()
        optimizer.zero_grad()
        states.append({name: t.clone() for name, t in model.state_dict().items()})
    return states


def same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]], atol: float) -> None:
    """Equal within `atol` after every update."""
    assert len(ours) == len(theirs), (len(ours), len(theirs))
    for i, (mine, other) in enumerate(zip(ours, theirs, strict=True)):
        for name, tensor in mine.items():
            torch.testing.assert_close(
                tensor, other[name], atol=atol, rtol=0, msg=f"{name} after update {i}: {{}}".format
            )
