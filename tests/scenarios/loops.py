"""Eager loops on two ranks, right and wrong, as `diagnose` sees them; `# culprit: NAME` marks the line to blame."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx.diagnosis.findings import Diagnosis
from gradsync_fx.eager_loops import diagnose
from tests.models import mlp
from tests.reference import Batch
from tests.scenarios.common import data_of
from tests.workers import WORLD


_mse = nn.functional.mse_loss


def _loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return _mse(model(x), y)


def _update(optimizer: Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def _right(k: int, data: list[Batch]) -> None:
    ddp, optimizer = _parts()
    for i, batch in enumerate(data):
        last = (i + 1) % k == 0
        with nullcontext() if last else ddp.no_sync():
            (_loss(ddp, *batch) / k).backward()
        if last:
            _update(optimizer)


def _off_by_one(k: int, data: list[Batch]) -> None:
    ddp, optimizer = _parts()
    for i, batch in enumerate(data):
        with nullcontext() if i % k == 0 else ddp.no_sync():  # culprit: off_by_one
            (_loss(ddp, *batch) / k).backward()
        if (i + 1) % k == 0:
            _update(optimizer)


def _bypassed(k: int, data: list[Batch]) -> None:
    ddp, optimizer = _parts()
    for i, batch in enumerate(data):
        loss = _mse(ddp.module(batch[0]), batch[1])  # culprit: bypassed
        (loss / k).backward()
        if (i + 1) % k == 0:
            _update(optimizer)


def _plain(k: int, data: list[Batch]) -> None:
    """An all-reduced metric is no reduction of gradients."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, batch in enumerate(data):
        loss = _loss(model, *batch)
        (loss / k).backward()  # culprit: plain
        dist.all_reduce(loss.detach())
        if (i + 1) % k == 0:
            _update(optimizer)


def _by_hand(k: int, data: list[Batch], flat: bool = False) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i, batch in enumerate(data):
        (_loss(model, *batch) / k).backward()
        if (i + 1) % k == 0:
            grads = [p.grad for p in model.parameters() if p.grad is not None]
            sent = [torch.cat([g.flatten() for g in grads])] if flat else grads
            for g in sent:
                dist.all_reduce(g)
                g.div_(WORLD)
            if flat:
                nn.utils.vector_to_parameters(sent[0], grads)
            _update(optimizer)


def _flat_by_hand(k: int, data: list[Batch]) -> None:
    _by_hand(k, data, flat=True)


def _accelerate(k: int, data: list[Batch]) -> None:
    accelerator, model, optimizer = _accelerated(k)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, *batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            _update(optimizer)


def _accelerate_late(k: int, data: list[Batch]) -> None:
    accelerator, model, optimizer = _accelerated(k)
    for batch in data:
        loss = _loss(model, *batch)
        with accelerator.accumulate(model):  # culprit: accelerate_late
            accelerator.backward(loss)
            _update(optimizer)


def _accelerate_unprepared(k: int, data: list[Batch]) -> None:
    """The optimizer alone is prepared, and the model trained as it is."""
    accelerator, _, _ = _accelerated(k)
    model = mlp()
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    for batch in data:
        with accelerator.accumulate():
            accelerator.backward(_loss(model, *batch))  # culprit: accelerate_unprepared
            _update(optimizer)


def _accelerate_by_hand(k: int, data: list[Batch]) -> None:
    accelerator, model, optimizer = _accelerated(k)
    for batch in data:
        with accelerator.accumulate(model):
            _loss(model, *batch).backward()  # culprit: accelerate_by_hand
            _update(optimizer)


def _accelerate_divided(k: int, data: list[Batch]) -> None:
    accelerator, model, optimizer = _accelerated(k)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, *batch) / k)  # culprit: accelerate_divided
            _update(optimizer)


def _accelerate_clip(k: int, data: list[Batch]) -> None:
    accelerator, model, optimizer = _accelerated(k)
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(_loss(model, *batch))
            accelerator.clip_grad_norm_(model.parameters(), 1.0)  # culprit: accelerate_clip
            _update(optimizer)


def _parts() -> tuple[DistributedDataParallel, Optimizer]:
    ddp = DistributedDataParallel(mlp())
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)


def _accelerated(k: int) -> tuple[Accelerator, nn.Module, Optimizer]:
    """What a script under `accelerate launch --cpu` on two ranks has, in the group that is there already."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=k)
    model = mlp()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert isinstance(model, DistributedDataParallel)
    return accelerator, model, optimizer


def diagnosed(rank: int, how: str, k: int) -> Diagnosis:
    """The diagnosis of the loop `_how`, over two windows."""
    loop: Callable[[int, list[Batch]], None] = globals()[f"_{how}"]
    data = [batch for window in data_of(rank, 2, k) for batch in window]
    launched = {
        "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500,
    }  # fmt: skip
    with mock.patch.dict(os.environ, {name: str(value) for name, value in launched.items()}):
        try:
            return diagnose(loop, k, data, micro_steps=k)
        finally:
            for state in (AcceleratorState, GradientState):
                state._reset_state()
            PartialState._shared_state.clear()
