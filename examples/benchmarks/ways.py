"""The ways to train with a window of k micro-steps, each as people write it, behind one call.

A way is built on every rank and then called for each micro-step: `way(batch, last)` computes the loss, accumulates,
and, in the last micro-step of a window, reduces and updates. It returns the loss, not divided by k.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import gradsync_fx
from gradsync_fx.options import OPTIMIZATIONS
from workloads import Workload


MicroStep = Callable[[Any, bool], Tensor]
RATE = 1e-4


@dataclass(frozen=True)
class Setting:
    """What a way is built from. alone: a group of this rank only."""

    workload: Workload
    device: torch.device
    k: int
    backend: str
    alone: ProcessGroup | None

    def model(self) -> nn.Module:
        """A copy of the model, equal on all ranks and for all ways."""
        torch.manual_seed(0)
        return self.workload.build().to(self.device)

    def ddp(self, model: nn.Module, **options: Any) -> DistributedDataParallel:
        return DistributedDataParallel(model, gradient_as_bucket_view=True, **options)


@dataclass(frozen=True)
class Way:
    """tolerance: how far its losses may be from the others', relatively. peer: one that gradsync_fx competes with."""

    title: str
    build: Callable[[Setting], MicroStep]
    # DDP with and without a compiled ResNet was seen to drift apart by 3e-3.
    tolerance: float = 5e-3
    peer: bool = True
    reduces: bool = True


def _accelerated(setting: Setting) -> tuple[Accelerator, nn.Module, Any]:
    # Divides the loss by k in `backward`, whether or not `accumulate` is used.
    accelerator = Accelerator(
        cpu=setting.device.type == "cpu", gradient_accumulation_steps=setting.k
    )
    model = setting.model()
    model, optimizer = accelerator.prepare(model, AdamW(model.parameters(), lr=RATE))
    return accelerator, model, optimizer


def _every_batch(setting: Setting) -> MicroStep:
    accelerator, model, optimizer = _accelerated(setting)

    def micro_step(batch: Any, last: bool) -> Tensor:
        loss = setting.workload.loss(model, batch)
        accelerator.backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _no_sync_late(setting: Setting) -> MicroStep:
    accelerator, model, optimizer = _accelerated(setting)

    def micro_step(batch: Any, last: bool) -> Tensor:
        loss = setting.workload.loss(model, batch)
        # The usual mistake: DDP decided in forward that this backward reduces.
        with nullcontext() if last else accelerator.no_sync(model):
            accelerator.backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _no_sync(setting: Setting) -> MicroStep:
    accelerator, model, optimizer = _accelerated(setting)

    def micro_step(batch: Any, last: bool) -> Tensor:
        with nullcontext() if last else accelerator.no_sync(model):
            loss = setting.workload.loss(model, batch)
            accelerator.backward(loss)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _accumulate(setting: Setting) -> MicroStep:
    accelerator, model, optimizer = _accelerated(setting)

    def micro_step(batch: Any, last: bool) -> Tensor:
        with accelerator.accumulate(model):
            loss = setting.workload.loss(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _sharded_ddp(setting: Setting) -> MicroStep:
    """DDP with torch's own sharded optimizer: gradients are reduced to every rank, new parameters are broadcast."""
    # Its module warns, as it is loaded, of what torch itself has given up.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    ddp = setting.ddp(setting.model())
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), AdamW, lr=RATE)

    def micro_step(batch: Any, last: bool) -> Tensor:
        with nullcontext() if last else ddp.no_sync():
            loss = setting.workload.loss(ddp, batch)
            (loss / setting.k).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _ddp(
    setting: Setting, *, fused: bool = False, forward: bool = False, update: bool = False
) -> MicroStep:
    """`no_sync` by hand. forward, update: which of model and optimizer step are compiled."""
    ddp = setting.ddp(setting.model())
    optimizer = AdamW(ddp.parameters(), lr=RATE, fused=fused)
    model = torch.compile(ddp, backend=setting.backend) if forward else ddp
    step = torch.compile(optimizer.step, backend=setting.backend) if update else optimizer.step

    def micro_step(batch: Any, last: bool) -> Tensor:
        with nullcontext() if last else ddp.no_sync():
            loss = setting.workload.loss(model, batch)
            (loss / setting.k).backward()
        if last:
            step()
            optimizer.zero_grad()
        return loss

    return micro_step


@contextmanager
def _python_reducing() -> Iterator[None]:
    """torch's settings for DDP's Python reducer; its constructor sets Inductor's for the whole process, undone here."""
    with (
        torch._dynamo.config.patch(optimize_ddp="python_reducer", compiled_autograd=True),
        torch._inductor.config.patch(_fuse_ddp_communication=True, _fuse_ddp_bucket_size=25),
    ):
        yield


def _python_reducer(setting: Setting) -> MicroStep:
    """DDP's hooks traced into the graph of the backward."""
    with _python_reducing():
        ddp = setting.ddp(setting.model())
    optimizer = AdamW(ddp.parameters(), lr=RATE, fused=True)

    # Compiled autograd is on inside of what torch.compile returns: the backward has to be in it.
    @torch.compile(backend=setting.backend)
    def forward_backward(batch: Any) -> Tensor:
        loss = setting.workload.loss(ddp, batch)
        (loss / setting.k).backward()
        return loss

    def micro_step(batch: Any, last: bool) -> Tensor:
        with _python_reducing(), nullcontext() if last else ddp.no_sync():
            loss = forward_backward(batch)
        if last:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return micro_step


def _gradsync(setting: Setting, **options: Any) -> MicroStep:
    model = setting.model()
    optimizer = AdamW(model.parameters(), lr=RATE)

    def train_step(model: nn.Module, optimizer: AdamW, batch: Any) -> Tensor:
        loss = setting.workload.loss(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=setting.k, backend=setting.backend, **options
    )
    return _OurStep(step, model, optimizer)


class _OurStep:
    """settle: waits for what a call left to be done under the next one."""

    def __init__(self, step: Any, model: nn.Module, optimizer: AdamW) -> None:
        self._step, self._model, self._optimizer = step, model, optimizer
        self.settle = step.settle

    def __call__(self, batch: Any, last: bool) -> Tensor:
        loss: Tensor = self._step(self._model, self._optimizer, batch)
        return loss


WAYS = {
    "accelerate-every-batch": Way("Accelerate, sync every batch", _every_batch),
    "accelerate-late": Way("Accelerate, `no_sync` round backward only", _no_sync_late),
    "accelerate-no-sync": Way("Accelerate, `no_sync`", _no_sync),
    "accelerate": Way("Accelerate, `accumulate()`", _accumulate),
    "ddp": Way("DDP `no_sync`, bucket views", _ddp),
    "ddp-fused": Way("DDP `no_sync`, `AdamW(fused=True)`", lambda s: _ddp(s, fused=True)),
    "ddp-compiled": Way(
        "DDP `no_sync`, fused, model compiled", lambda s: _ddp(s, fused=True, forward=True)
    ),
    "ddp-compiled-update": Way(
        "DDP `no_sync`, model and optimizer step compiled",
        lambda s: _ddp(s, forward=True, update=True),
    ),
    "ddp-zero": Way("DDP `no_sync`, `ZeroRedundancyOptimizer`", _sharded_ddp),
    "gradsync": Way("gradsync_fx", _gradsync, peer=False),
    "gradsync-bf16": Way(
        "gradsync_fx, bf16 wire",
        lambda s: _gradsync(s, reduce_dtype=torch.bfloat16),
        tolerance=2e-2,
        peer=False,
    ),
    "gradsync-sharded": Way(
        "gradsync_fx, sharded", lambda s: _gradsync(s, shard_optimizer=True), peer=False
    ),
    "gradsync-sharded-bf16": Way(
        "gradsync_fx, sharded, bf16 wire",
        lambda s: _gradsync(s, shard_optimizer=True, reduce_dtype=torch.bfloat16),
        tolerance=2e-2,
        peer=False,
    ),
    "gradsync-hidden": Way(
        "gradsync_fx, sharded, gathers hidden",
        lambda s: _gradsync(s, shard_optimizer=True, overlap_param_gather=True),
        peer=False,
    ),
    "gradsync-hidden-bf16": Way(
        "gradsync_fx, sharded, gathers hidden, bf16 wire",
        lambda s: _gradsync(
            s, shard_optimizer=True, overlap_param_gather=True, reduce_dtype=torch.bfloat16
        ),
        tolerance=2e-2,
        peer=False,
    ),
    # Each rank in a group of its own: what the step costs when there is nobody to talk to. The copies drift apart.
    "floor": Way(
        "floor: gradsync_fx without collectives",
        lambda s: _gradsync(s, process_group=s.alone),
        peer=False,
        reduces=False,
    ),
    # The last to be built: its DDP changes, for all that is compiled later, what Dynamo traces into.
    "ddp-python-reducer": Way("DDP `python_reducer`, compiled autograd", _python_reducer),
}
USUAL_WAYS = list(WAYS)


def _without(optimization: str) -> Way:
    return Way(
        f"gradsync_fx without {optimization!r}",
        lambda s: _gradsync(s, without=(optimization,)),
        peer=False,
    )


# What each optimization is worth: run on request. shared_compile is not among them: it makes no program faster.
WAYS |= {
    f"without-{optimization}": _without(optimization)
    for optimization in OPTIMIZATIONS
    if optimization != "shared_compile"
}
