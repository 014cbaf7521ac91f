"""Whole windows on two ranks, with what eager DDP and one process on the joined batch make of them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.counting import counted
from tests.drive import drive, plain_step, quick, step_of
from tests.models import Convnet, Lin, mlp
from tests.optimizers import adamw, sgd
from tests.reference import Run, accumulation, classification, images, joined, twins
from tests.scenarios.common import Make, data_of, wrapped
from tests.workers import WORLD


def against_references(
    rank: int,
    wrap: str,
    k: int,
    make: Make,
    windows: int,
    ddp: dict[str, Any],
    options: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Ours, eager DDP with `no_sync`, and one process on the joined batch, from the same start."""
    ours, eager, whole = twins(mlp(), 3)
    model, reference = wrapped(ours, wrap, **ddp), DistributedDataParallel(eager)
    step = quick(plain_step, k, **(options or {}))
    mine = drive(step, model, make(model), data_of(rank, windows, k))
    theirs = accumulation(reference, make(reference), data_of(rank, windows, k))
    batch = joined(whole, make(whole), [data_of(r, windows, k) for r in range(WORLD)])
    return {
        "ours": mine, "eager": theirs, "joined": batch, "compiled": step.compile_count,
        "report": str(step.report()),
    }  # fmt: skip


def lin(rank: int, wrap: str, k: int, windows: int) -> list[float]:
    """The weight after each window; micro-step i of window n has x = 1 + 3 n + i + 10 rank."""
    model = wrapped(Lin(), wrap)
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), k)
    weights = []
    for n in range(windows):
        for i in range(k):
            step(model, optimizer, torch.tensor(float(1 + 3 * n + i + 10 * rank)))
        weights.append(next(model.parameters()).item())
    return weights


def off_by_one(rank: int) -> float:
    """x = (1, 3) on rank 0 and (1, 6) on rank 1, k = 2, sums: 5.5 on both."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, reduction="sum")
    for x in ((1.0, 3.0), (1.0, 6.0))[rank]:
        step(model, optimizer, torch.tensor(x))
    return -model.w.item()


def buffers(rank: int, wrap: str, setting: str, k: int) -> dict[str, Run]:
    """Batch statistics: ours, and eager DDP with `no_sync`."""
    ours, eager = twins(Convnet())
    made = {"broadcast_buffers": False} if setting == "off" else {}
    option = {} if setting in ("off", "default") else {"broadcast_buffers": setting}
    data = images(4, k, seed=20 + rank)
    model = wrapped(ours, wrap, **made)
    reference = DistributedDataParallel(eager, broadcast_buffers=setting not in ("off", "never"))
    step = quick(step_of(classification), k, **option)
    mine = drive(step, model, sgd(model), data)
    # What we call "every" is what DDP does without `no_sync`: buffers follow rank 0 at each forward.
    quiet = setting != "every"
    theirs = accumulation(reference, sgd(reference), data, classification, quiet=quiet)
    return {"ours": mine, "eager": theirs}


def buffers_of_a_rank_that_ends_early(rank: int) -> dict[str, Any]:
    """broadcast_buffers="every" with 4 and 7 micro-steps: nobody waits for ever, and buffers are rank 0's."""
    model = Convnet()
    optimizer = sgd(model)
    step = quick(step_of(classification), 3, broadcast_buffers="every")
    data = [batch for window in images(3, 3, seed=20 + rank) for batch in window]
    for batch in data[: 4 + 3 * rank]:
        step(model, optimizer, *batch)
    step.flush()
    return {"state": model.state_dict(), "updates": step.optimizer_step}


def inner_module(rank: int) -> list[Run]:
    """`ddp.module(x)` in the step: the wrapper is bypassed, and the gradients are reduced all the same."""
    ours, whole = twins(mlp())
    model = DistributedDataParallel(ours)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model.module(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    optimizer = sgd(model)
    run = quick(step, 2)
    mine = Run()
    data = [data_of(r, 3, 2) for r in range(WORLD)]
    for window in data[rank]:
        for batch in window:
            run(*batch)
        mine.updated(model)
    return [mine, joined(whole, sgd(whole), data)]


def nested(rank: int) -> dict[str, Any]:
    """A plain module whose parts are each in DDP: their gradients are sent together."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1 = DistributedDataParallel(nn.Linear(8, 8))
            self.c2 = DistributedDataParallel(nn.Linear(8, 8))
            self.c3 = DistributedDataParallel(nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.c3(self.c2(self.c1(x)))

    ours = Outer()
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    optimizer = sgd(ours)
    run = quick(plain_step, 2)
    data = [data_of(r, 3, 2) for r in range(WORLD)]
    each = []
    for window in data[rank]:
        for batch in window:
            with counted() as one:
                run(ours, optimizer, *batch)
            each.append(one.all_reduces)
    joined(whole, sgd(whole), data)
    return {
        "ours": [p.detach() for p in ours.parameters()],
        "whole": [p.detach() for p in whole.parameters()],
        "each": each[2:],
    }


def subgroup(rank: int) -> list[float]:
    """A group of one rank each: nothing is reduced over the ranks."""
    groups = [dist.new_group([r]) for r in range(WORLD)]
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, process_group=groups[rank])
    for i in range(2):
        step(model, optimizer, torch.tensor(float(1 + i + 10 * rank)))
    return [model.w.item()]


def resumed(rank: int, stop: int) -> list[list[Tensor]]:
    """AdamW over two windows of three, with and without a stop after `stop` micro-steps."""
    data = [batch for window in data_of(rank, 2, 3) for batch in window]
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = adamw(model)
        step = quick(plain_step, 3)
        for i, batch in enumerate(data):
            if interrupted and i == stop:
                saved = (model.state_dict(), optimizer.state_dict(), step.state_dict())
                model = mlp()
                model.load_state_dict(saved[0])
                optimizer = adamw(model)
                optimizer.load_state_dict(saved[1])
                step = quick(plain_step, 3)
                step.load_state_dict(saved[2])
            step(model, optimizer, *batch)
        runs.append([p.detach().clone() for p in model.parameters()])
    return runs
