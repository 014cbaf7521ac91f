"""Ranks that do not do the same, and what each of them is told."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from gradsync_fx.comm.liveness import Compilations
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import twins
from tests.scenarios.common import data_of


def refusal(call: Callable[[], object]) -> dict[str, Any]:
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
    model, start = twins(mlp())
    optimizer = sgd(model)
    step = quick(plain_step, 2 + rank)
    calls = []

    def run() -> None:
        for batch in data_of(rank, 1, 6)[0]:
            calls.append(step.micro_step)
            step(model, optimizer, *batch)

    pairs = zip(model.parameters(), start.parameters(), strict=True)
    error = refusal(run)
    return {**error, "calls": len(calls), "moved": not all(torch.equal(a, b) for a, b in pairs)}


def discarded_alone(rank: int) -> dict[str, Any]:
    """Rank 1 discards its open window; the others do not."""
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 3)

    def run() -> None:
        for i, batch in enumerate(data_of(rank, 1, 4)[0]):
            step(model, optimizer, *batch)
            if i == 0 and rank == 1:
                step.discard()

    return refusal(run)


def other_start(rank: int, which: str) -> dict[str, Any]:
    """Rank 1's third parameter starts with other values, or all of its parameters do."""
    if which == "all":
        torch.manual_seed(rank)
    model = mlp()
    if which == "third" and rank == 1:
        with torch.no_grad():
            model[2].weight.add_(1.0)
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    return refusal(lambda: step(model, optimizer, *data_of(rank, 1, 1)[0][0]))


def flush_before_capture(rank: int) -> dict[str, Any]:
    step = quick(plain_step, 2)
    return refusal(step.flush)


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
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    return refusal(lambda: step(model, optimizer, *data_of(rank, 1, 1)[0][0]))


def comes_late(rank: int) -> dict[str, Any]:
    """Rank 1 sleeps in the second window, longer than rank_timeout."""
    model = mlp()
    optimizer = sgd(model)
    group = (
        dist.new_group()
    )  # what times out cannot be used again: not the group of the other tests
    step = quick(plain_step, 2, rank_timeout=1.5, process_group=group)
    data = data_of(rank, 2, 2)
    for batch in data[0]:
        step(model, optimizer, *batch)

    def run() -> None:
        for batch in data[1]:
            if rank == 1:
                time.sleep(2)
            step(model, optimizer, *batch)

    return {**refusal(run), "updates": step.optimizer_step}


def compiles_long(rank: int, seconds: float, longest: float) -> dict[str, Any]:
    """Rank 1 compiles for longer than rank_timeout: the others wait, for no longer than `longest`."""

    def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
        if rank == 1:
            time.sleep(seconds)
        return module

    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2, rank_timeout=1.0, backend=backend, process_group=dist.new_group())

    def run() -> None:
        for batch in data_of(rank, 1, 4)[0]:
            step(model, optimizer, *batch)

    with mock.patch.object(Compilations, "LONGEST", longest):
        return {**refusal(run), "updates": step.optimizer_step}
