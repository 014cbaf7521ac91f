"""The same step, as Accelerate runs it and through `optimize`, on one rank (None) or as one of two."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

import gradsync_fx
from tests.counting import counted
from tests.drive import quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import Run, Window, mse, regression
from tests.workers import WORLD


Step = Callable[[Tensor, Tensor], Tensor]
OPTIMIZERS: dict[str, Any] = {
    "sgd": sgd,
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
}
SCHEDULERS: dict[str, Any] = {
    "step": lambda o: StepLR(o, 1, gamma=0.7),
    "lambda": lambda o: LambdaLR(o, lambda n: 1 / (1 + n)),
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=3),  # ends inside the run
}


@dataclass
class Prepared:
    """What `accelerator.prepare` gave."""

    accelerator: Accelerator
    model: nn.Module
    optimizer: Any
    scheduler: Any
    rates: list[float] = field(default_factory=list)

    def updated(self, run: Run) -> None:
        run.updated(self.model)
        self.rates.append(self.scheduler.get_last_lr()[0])


@contextmanager
def launched(rank: int | None) -> Iterator[None]:
    """As in a script under `accelerate launch --cpu`; Accelerate's global states are gone at the end."""
    told = {} if rank is None else {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    with mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}):
        try:
            yield
        finally:
            for state in (AcceleratorState, GradientState):
                state._reset_state()
            PartialState._shared_state.clear()


def prepared(how: dict[str, Any], k: int) -> Prepared:
    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=k, mixed_precision=how.get("precision", "no")
    )
    torch.manual_seed(0)
    model = mlp()
    optimizer = OPTIMIZERS[how.get("optimizer", "sgd")](model)
    scheduler = SCHEDULERS[how.get("scheduler", "step")](optimizer)
    return Prepared(accelerator, *accelerator.prepare(model, optimizer, scheduler))


def step_of(p: Prepared, style: str) -> Step:
    """The step of a script that uses Accelerate, in the ways in which such scripts are written."""
    accelerator, model, optimizer, scheduler = p.accelerator, p.model, p.optimizer, p.scheduler

    def documented(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            loss = mse(model, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        return loss

    def by_value(x: Tensor, y: Tensor) -> Tensor:
        with accelerator.accumulate(model):
            with accelerator.autocast():
                loss = mse(model, x, y)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_value_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        return loss

    def bare(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss

    return {"documented": documented, "by_value": by_value, "bare": bare}[style]


def theirs(how: dict[str, Any], windows: list[Window]) -> tuple[Run, list[float]]:
    """Accelerate's own loop. A short window is told its length, for a mean over what it has."""
    run = Run()
    p = prepared(how, len(windows[0]))
    step = step_of(p, how["style"])
    for window in windows:
        p.accelerator.gradient_accumulation_steps, p.accelerator.step = len(window), 0
        for batch in window:
            around = p.accelerator.accumulate(p.model) if how["style"] == "bare" else nullcontext()
            with around:
                run.losses.append(step(*batch).detach())
        p.updated(run)
    return run, p.rates


def ours(how: dict[str, Any], windows: list[Window]) -> tuple[Run, list[float], dict[str, Any]]:
    """`optimize` over the same step; `declares`: Accelerate's own k; `around`: its window round every call."""
    run, k = Run(), len(windows[0])
    p = prepared(how, how.get("declares", 1))
    step: gradsync_fx.OptimizedStep = quick(step_of(p, how["style"]), k)
    sums = []
    for window in windows:
        for i, batch in enumerate(window):
            around = p.accelerator.accumulate(p.model) if how.get("around") else nullcontext()
            with counted() as count, around:
                run.losses.append(step(*batch))
            sums.append(count.all_reduces)
            assert step.sync_gradients is (i + 1 == k)
        if len(window) < k:
            step.flush()
        p.updated(run)
    facts = {
        "sums": sums,
        "compiled": step.compile_count,
        "wrapped": isinstance(p.model, DistributedDataParallel),
        "updates": step.optimizer_step,
    }
    return run, p.rates, facts


def both(rank: int | None, how: dict[str, Any], lengths: list[int]) -> dict[str, Any]:
    """Windows of these lengths, ours and theirs."""
    seed, k = 10 + (rank or 0), max(lengths)
    windows = [
        window[:length]
        for window, length in zip(regression(len(lengths), k, seed=seed), lengths, strict=True)
    ]
    with launched(rank):
        expected, expected_rates = theirs(how, windows)
    with launched(rank):
        found, rates, facts = ours(how, windows)
    return {
        "found": found,
        "expected": expected,
        "rates": rates,
        "expected_rates": expected_rates,
        **facts,
    }
