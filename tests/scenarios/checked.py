"""A step checks itself on two ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.drive import quick
from tests.models import Convnet
from tests.optimizers import adamw


def classified(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def by_hand(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(2)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def both_ways(rank: int, wrap: str) -> tuple[bool, str, bool]:
    model: nn.Module = Convnet()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    optimizer = adamw(model)
    before = copy.deepcopy(model.state_dict())
    step = quick(by_hand if wrap == "by hand" else classified, 3)
    torch.manual_seed(rank)
    verdict = step.self_check(model, optimizer, torch.randn(4, 1, 8, 8), torch.randint(10, (4,)))
    moved = not all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    return verdict.equal, str(verdict), moved


def one_wrong(rank: int) -> tuple[bool, str, bool]:
    """Rank 1's runtime divides its windows by a number a little too large."""
    right = gradsync_fx.runtime.ending.Ending.divisors
    if rank == 1:
        gradsync_fx.runtime.ending.Ending.divisors = lambda self, totals: {  # type: ignore[method-assign]
            key: 1.05 * value for key, value in right(self, totals).items()
        }
    try:
        return both_ways(rank, "ddp")
    finally:
        gradsync_fx.runtime.ending.Ending.divisors = right  # type: ignore[method-assign]
