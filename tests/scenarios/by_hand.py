"""All-reduces that the user wrote into the step: of gradients, and of a metric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.counting import counted
from tests.drive import drive, plain_step, quick, step_of
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import accumulation, joined, mse, twins
from tests.scenarios.common import data_of, wrapped
from tests.workers import WORLD


def _each(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)
        p.grad.div_(WORLD)


def _average(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = funcol.all_reduce(p.grad, "avg", dist.group.WORLD)


def _functional(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad = funcol.all_reduce(p.grad, "sum", dist.group.WORLD) / WORLD


def _divided_before(model: nn.Module) -> None:
    for p in model.parameters():
        assert p.grad is not None
        p.grad.div_(WORLD)
        dist.all_reduce(p.grad)


def _flat(model: nn.Module) -> None:
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    flat = torch.cat([g.reshape(-1) for g in grads])
    dist.all_reduce(flat)
    flat /= WORLD
    start = 0
    for g in grads:
        g.copy_(flat[start : start + g.numel()].view_as(g))
        start += g.numel()


def _own_division(model: nn.Module) -> None:
    """Sums over the ranks and divides by nothing: the user's own arithmetic is kept."""
    for p in model.parameters():
        assert p.grad is not None
        dist.all_reduce(p.grad)


HAND: dict[str, Callable[[nn.Module], None]] = {
    "each": _each,
    "average": _average,
    "functional": _functional,
    "divided_before": _divided_before,
    "flat": _flat,
    "own_division": _own_division,
}


def gradients(rank: int, how: str, k: int) -> dict[str, Any]:
    """A hand-written reduction, eager accumulation that does the same once for each window, and the joined batch."""
    ours, eager, whole = twins(mlp(), 3)
    data = [data_of(r, 5, k) for r in range(WORLD)]
    run = quick(step_of(mse, HAND[how]), k)
    optimizer = sgd(ours)
    with counted() as first:
        mine = drive(run, ours, optimizer, data[rank][:1])
    mine += drive(run, ours, optimizer, data[rank][1:])
    each = []
    for batch in data[rank][0]:
        with counted() as one:
            run(ours, optimizer, *batch)
        each.append(one.all_reduces)
    theirs = accumulation(eager, sgd(eager), data[rank], before=lambda: _in_eager(how, eager))
    return {
        "ours": mine, "eager": theirs, "joined": joined(whole, sgd(whole), data),
        "first": first.all_reduces, "each": each,
    }  # fmt: skip


def _in_eager(how: str, model: nn.Module) -> None:
    """gloo has no average, and functional results are no leaves' gradients: eager sums and divides."""
    HAND["each" if how in ("average", "functional") else how](model)


def metric(rank: int, wrap: str, k: int) -> dict[str, Any]:
    """An all-reduced metric is no gradient: it stays in every micro-step, and shows the mean of both ranks."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = plain_step(model, optimizer, x, y)
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return loss, shown / WORLD

    model = wrapped(mlp(), wrap)
    optimizer = sgd(model)
    run = quick(step, k)
    losses, shown, each = [], [], []
    for batch in data_of(rank, 1, k)[0]:
        loss, value = run(model, optimizer, *batch)
        losses.append(loss)
        shown.append(value)
    for batch in data_of(rank, 1, k)[0]:
        with counted() as one:
            run(model, optimizer, *batch)
        each.append(one.all_reduces)
    return {
        "losses": losses,
        "shown": shown,
        "each": each,
        "kept": [k.line for k in run.report().kept],
    }
