"""What each of two ranks does in test_ranks.py: top-level functions, called by name in the rank's process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradsync_fx
from tests.counting import counted
from tests.drive import drive, plain_step, quick, step_of
from tests.models import Convnet, Lin, mlp
from tests.reference import Run, Window, accumulation, joined, mse, regression, twins


WORLD = 2
OPTIMIZERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
}


def _wrapped(model: nn.Module, wrap: str, **options: Any) -> nn.Module:
    return model if wrap == "plain" else DistributedDataParallel(model, **options)


def _data(rank: int, windows: int, k: int) -> list[Window]:
    return regression(windows, k, seed=10 + rank)


def against_references(
    rank: int, wrap: str, k: int, name: str, windows: int, ddp: dict[str, Any]
) -> dict[str, Any]:
    """Ours, eager DDP with `no_sync`, and one process on the joined batch, from the same start."""
    ours, eager, whole = twins(mlp(), 3)
    model, reference = _wrapped(ours, wrap, **ddp), DistributedDataParallel(eager)
    make = OPTIMIZERS[name]
    step = quick(plain_step, k)
    mine = drive(step, model, make(model), _data(rank, windows, k))
    theirs = accumulation(reference, make(reference), _data(rank, windows, k))
    batch = joined(whole, make(whole), [_data(r, windows, k) for r in range(WORLD)])
    return {
        "ours": mine, "eager": theirs, "joined": batch, "compiled": step.compile_count,
        "report": str(step.report()),
    }  # fmt: skip


def lin(rank: int, wrap: str, k: int, windows: int) -> list[float]:
    """The weight after each window; micro-step i of window n has x = 1 + 3 n + i + 10 rank."""
    model = _wrapped(Lin(), wrap)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
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
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, reduction="sum")
    for x in ((1.0, 3.0), (1.0, 6.0))[rank]:
        step(model, optimizer, torch.tensor(x))
    return -model.w.item()


def count(
    rank: int, wrap: str, k: int, cap: float | None, options: dict[str, Any]
) -> dict[str, Any]:
    """All-reduces that ran: of the first window, and of each micro-step of two more."""
    model = _wrapped(mlp(), wrap, **({"bucket_cap_mb": cap} if cap and wrap == "ddp" else {}))
    if cap and wrap == "plain":
        options = {**options, "bucket_cap_mb": cap}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = quick(plain_step, k, **options)
    data = _data(rank, 3, k)
    with counted() as first:
        drive(step, model, optimizer, data[:1])
    each = []
    for batch in data[1] + data[2]:
        with counted() as one:
            step(model, optimizer, *batch)
        each.append((one.all_reduces, one.all_gathers, one.broadcasts))
    report = step.report()
    return {
        "first": first.all_reduces, "each": each, "buckets": len(report.collectives),
        "before": report.collectives_before, "after": report.collectives_after,
    }  # fmt: skip


def count_eager(rank: int, k: int) -> list[int]:
    """The same count for eager DDP: shows that the counter counts."""
    model = DistributedDataParallel(mlp())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for synced in (True, False):
        for i, batch in enumerate(_data(rank, 1, k)[0]):
            quiet = not synced and i + 1 < k
            with counted() as one:
                context: AbstractContextManager[None] = model.no_sync() if quiet else nullcontext()
                with context:
                    mse(model, *batch).backward()
            found.append(one.all_reduces)
    optimizer.zero_grad()
    return found


def buffers(rank: int, wrap: str, setting: str, k: int) -> dict[str, Run]:
    """Batch statistics: ours, and eager DDP with `no_sync`."""
    ours, eager = twins(Convnet())
    made = {"broadcast_buffers": False} if setting == "off" else {}
    option = {} if setting in ("off", "default") else {"broadcast_buffers": setting}
    source = torch.Generator().manual_seed(20 + rank)
    data = [
        [
            (torch.randn(4, 1, 8, 8, generator=source), torch.randint(10, (4,), generator=source))
            for _ in range(k)
        ]
        for _ in range(4)
    ]

    def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    model = _wrapped(ours, wrap, **made)
    reference = DistributedDataParallel(eager, **made)
    make = OPTIMIZERS["sgd"]
    step = quick(step_of(loss_of), k, **option)
    mine = drive(step, model, make(model), data)
    return {"ours": mine, "eager": accumulation(reference, make(reference), data, loss_of)}


# Reductions that the user wrote


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


def by_hand(rank: int, how: str, k: int) -> dict[str, Any]:
    """A hand-written reduction, and eager accumulation that does the same once for each window."""
    reduce = HAND[how]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        reduce(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ours, eager = twins(mlp())
    make = OPTIMIZERS["sgd"]
    data = _data(rank, 5, k)
    run = quick(step, k)
    optimizer = make(ours)
    mine = drive(run, ours, optimizer, data)
    each = []
    for batch in data[0]:
        with counted() as one:
            run(ours, optimizer, *batch)
        each.append(one.all_reduces)
    theirs = accumulation(eager, make(eager), data, before=lambda: _in_eager(how, eager))
    return {"ours": mine, "eager": theirs, "each": each}


def _in_eager(how: str, model: nn.Module) -> None:
    """gloo has no average, and functional results are no leaves' gradients: eager sums and divides."""
    HAND["each" if how in ("average", "functional") else how](model)


def metric(rank: int, k: int) -> dict[str, Any]:
    """An all-reduced metric is no gradient: it stays in every micro-step, and shows the mean of both ranks."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        return loss, shown / WORLD

    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    run = quick(step, k)
    losses, shown, each = [], [], []
    for batch in _data(rank, 1, k)[0]:
        loss, value = run(model, optimizer, *batch)
        losses.append(loss)
        shown.append(value)
    for batch in _data(rank, 1, k)[0]:
        with counted() as one:
            run(model, optimizer, *batch)
        each.append(one.all_reduces)
    return {"losses": losses, "shown": shown, "each": each, "kept": run.report().kept}


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

    optimizer = OPTIMIZERS["sgd"](model)
    run = quick(step, 2)
    mine = Run()
    data = [_data(r, 3, 2) for r in range(WORLD)]
    for window in data[rank]:
        for batch in window:
            run(*batch)
        mine.updated(model)
    return [mine, joined(whole, OPTIMIZERS["sgd"](whole), data)]


def nested(rank: int) -> dict[str, Any]:
    """DDP inside of a plain module, beside an unwrapped part."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1 = DistributedDataParallel(nn.Linear(8, 8))
            self.c2 = nn.Linear(8, 8)
            self.c3 = DistributedDataParallel(nn.Linear(8, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.c3(self.c2(self.c1(x)))

    ours = Outer()
    whole = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))
    for mine, theirs in zip(ours.parameters(), whole.parameters(), strict=True):
        theirs.data.copy_(mine.data)
    optimizer = OPTIMIZERS["sgd"](ours)
    run = quick(plain_step, 2)
    data = [_data(r, 3, 2) for r in range(WORLD)]
    each = []
    for window in data[rank]:
        for batch in window:
            with counted() as one:
                run(ours, optimizer, *batch)
            each.append(one.all_reduces)
    joined(whole, OPTIMIZERS["sgd"](whole), data)
    return {
        "ours": [p.detach() for p in ours.parameters()],
        "whole": [p.detach() for p in whole.parameters()],
        "each": each[2:],
    }


# Ends of the data


def uneven(rank: int, counts: Sequence[int], k: int) -> dict[str, Any]:
    """Rank r has counts[r] micro-steps with x = 1, 2, ... + 10 r, then flushes."""
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), k)
    updates = []
    for i in range(counts[rank]):
        step(model, optimizer, torch.tensor(float(1 + i + 10 * rank)))
        if step.sync_gradients:
            updates.append(model.w.item())
    step.flush(on_update=lambda: updates.append(model.w.item()))
    return {"updates": updates, "steps": step.optimizer_step, "pending": step.pending}


def skipping(rank: int) -> dict[str, Any]:
    """Rank 1 skips one slot, first and then last: the mean is over the three terms that were summed."""
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2)
    step.prepare(model, optimizer, torch.tensor(0.0))
    weights, synced = [], []
    for where in (0, 1):
        for i in range(2):
            if rank == 1 and i == where:
                step.skip()
            else:
                step(model, optimizer, torch.tensor(float(1 + i + 10 * rank)))
            synced.append(step.sync_gradients)
        weights.append(model.w.item())
    return {"weights": weights, "synced": synced, "calls": step.micro_step}


def two_epochs(rank: int, k: int) -> list[tuple[int, int]]:
    """Five micro-steps and a flush, twice."""
    model = mlp()
    optimizer = OPTIMIZERS["adamw"](model)
    step = quick(plain_step, k)
    seen = []
    for epoch in range(2):
        for batch in regression(1, 5, seed=rank + epoch)[0]:
            step(model, optimizer, *batch)
        step.flush()
        seen.append((step.optimizer_step, step.pending))
    return seen


# Disagreement


def _error(call: Callable[[], object]) -> dict[str, Any]:
    start = time.monotonic()
    try:
        call()
    except gradsync_fx.GradSyncError as error:
        return {
            "type": type(error).__name__, "text": str(error), "seconds": time.monotonic() - start,
            "culprit": error.culprit, "fix": error.fix,
        }  # fmt: skip
    return {"type": "nothing", "text": "", "seconds": 0.0, "culprit": "", "fix": ""}


def other_k(rank: int) -> dict[str, Any]:
    """Rank 0 closes windows of 2, rank 1 windows of 3."""
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    step = quick(plain_step, 2 + rank)

    def run() -> None:
        for batch in _data(rank, 1, 6)[0]:
            step(model, optimizer, *batch)

    return _error(run)


def discarded_alone(rank: int) -> dict[str, Any]:
    """Rank 1 discards its open window; the others do not."""
    model = mlp()
    optimizer = OPTIMIZERS["sgd"](model)
    step = quick(plain_step, 3)

    def run() -> None:
        for i, batch in enumerate(_data(rank, 1, 4)[0]):
            step(model, optimizer, *batch)
            if i == 0 and rank == 1:
                step.discard()

    return _error(run)


def other_start(rank: int) -> dict[str, Any]:
    """Rank 1's third parameter starts with other values."""
    model = mlp()
    if rank == 1:
        with torch.no_grad():
            model[2].weight.add_(1.0)
    optimizer = OPTIMIZERS["sgd"](model)
    step = quick(plain_step, 2)
    return _error(lambda: step(model, optimizer, *_data(rank, 1, 1)[0][0]))


def flush_before_capture(rank: int) -> dict[str, Any]:
    step = quick(plain_step, 2)
    return _error(step.flush)


def comm_hook(rank: int) -> dict[str, Any]:
    """A communication hook on the DDP module."""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise AssertionError("never called")

    # torch compares the annotations themselves.
    hook.__annotations__ = {
        "bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]
    }  # fmt: skip

    model = DistributedDataParallel(mlp())
    model.register_comm_hook(None, hook)
    optimizer = OPTIMIZERS["sgd"](model)
    step = quick(plain_step, 2)
    return _error(lambda: step(model, optimizer, *_data(rank, 1, 1)[0][0]))


# Saving


def resumed(rank: int, stop: int) -> list[list[Tensor]]:
    """AdamW over two windows of three, with and without a stop after `stop` micro-steps."""
    data = [batch for window in _data(rank, 2, 3) for batch in window]
    runs = []
    for interrupted in (False, True):
        torch.manual_seed(0)
        model = mlp()
        optimizer = OPTIMIZERS["adamw"](model)
        step = quick(plain_step, 3)
        for i, batch in enumerate(data):
            if interrupted and i == stop:
                saved = (model.state_dict(), optimizer.state_dict(), step.state_dict())
                model = mlp()
                model.load_state_dict(saved[0])
                optimizer = OPTIMIZERS["adamw"](model)
                optimizer.load_state_dict(saved[1])
                step = quick(plain_step, 3)
                step.load_state_dict(saved[2])
            step(model, optimizer, *batch)
        runs.append([p.detach().clone() for p in model.parameters()])
    return runs


def subgroup(rank: int) -> list[float]:
    """A group of one rank each: nothing is reduced over the ranks."""
    groups = [dist.new_group([r]) for r in range(WORLD)]
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, process_group=groups[rank])
    for i in range(2):
        step(model, optimizer, torch.tensor(float(1 + i + 10 * rank)))
    return [model.w.item()]


def by_inductor(rank: int) -> dict[str, Any]:
    ours, eager = twins(mlp())
    make = OPTIMIZERS["sgd"]
    reference = DistributedDataParallel(eager)
    step = quick(plain_step, 2, backend="inductor")
    optimizer = make(ours)
    data = _data(rank, 3, 2)
    mine = drive(step, ours, optimizer, data)
    each = []
    for batch in data[0]:
        with counted() as one:
            step(ours, optimizer, *batch)
        each.append(one.all_reduces)
    theirs = accumulation(reference, make(reference), data)
    return {"ours": mine, "eager": theirs, "each": each}
