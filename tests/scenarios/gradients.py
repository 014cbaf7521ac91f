"""What people do to gradients between backward and update, on two ranks, beside the same in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.counting import counted
from tests.drive import quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import mse
from tests.scenarios.common import data_of


WORLD, K = 2, 3


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def norm_foreach(model: nn.Module, ranks: int) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)


def norm_each(model: nn.Module, ranks: int) -> Tensor:
    return nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def value(model: nn.Module, ranks: int) -> Tensor:
    nn.utils.clip_grad_value_(model.parameters(), 0.01)
    return _grads(model)[0].abs().max()


def by_hand(model: nn.Module, ranks: int) -> Tensor:
    norm = torch.stack([g.pow(2).sum() for g in _grads(model)]).sum().sqrt()
    for g in _grads(model):
        g.mul_(0.1 / (norm + 1e-6))
    return norm


def noise(model: nn.Module, ranks: int) -> Tensor:
    for g in _grads(model):
        g.add_(torch.randn_like(g), alpha=0.1)
    return _grads(model)[0].sum()


def norm_over_ranks(model: nn.Module, ranks: int) -> Tensor:
    """A norm with an all-reduce of its own: on equal gradients, the square times the ranks."""
    squares = torch.stack([g.pow(2).sum() for g in _grads(model)]).sum()
    if ranks == 1:
        squares = squares * WORLD
    else:
        dist.all_reduce(squares)
    for g in _grads(model):
        g.mul_(0.1 / (squares.sqrt() + 1e-6))
    return squares


def found_inf(model: nn.Module, ranks: int) -> Tensor:
    """A flag reduced with max; infinite gradients become zero everywhere."""
    flag = torch.stack([(~torch.isfinite(g)).any() for g in _grads(model)]).any().float()
    if ranks > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    for g in _grads(model):
        g.copy_(torch.where(flag > 0, torch.zeros_like(g), g))
    return flag


USES: dict[str, Callable[[nn.Module, int], Tensor]] = {
    f.__name__: f
    for f in (norm_foreach, norm_each, value, by_hand, noise, norm_over_ranks, found_inf)
}


def used(rank: int, name: str) -> dict[str, Any]:
    """Three windows: parameters of ours and of one process with all data, what the use gave, and all-reduces."""
    use = USES[name]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss = mse(model, x, y)
        loss.backward()
        seen = use(model, WORLD)
        optimizer.step()
        optimizer.zero_grad()
        return loss, seen

    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = sgd(model), sgd(other)
    run = quick(step, K)
    data = [data_of(r, 3, K) for r in range(WORLD)]
    if name == "found_inf":
        data[1][1][0][0].fill_(torch.inf)  # rank 1, second window
    ours, seen, collectives = [], [], []
    torch.manual_seed(7)
    for window in data[rank]:
        for batch in window:
            with counted() as count:
                _, given = run(model, optimizer, *batch)
            seen.append(given.item())
            collectives.append(count.all_reduces)
        ours.append([p.detach().clone() for p in model.parameters()])
    wanted, told = [], []
    torch.manual_seed(7)
    for n in range(3):
        for r in range(WORLD):
            for batch in data[r][n]:
                (mse(other, *batch) / (K * WORLD)).backward()
        told.append(use(other, 1).item())
        theirs.step()
        theirs.zero_grad()
        wanted.append([p.detach().clone() for p in other.parameters()])
    return {"ours": ours, "wanted": wanted, "seen": seen, "told": told, "collectives": collectives}
