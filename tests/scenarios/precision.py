"""What goes over the wire."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.drive import drive, plain_step, quick, step_of
from tests.models import Lin, mlp
from tests.optimizers import sgd
from tests.reference import accumulation, twins
from tests.scenarios.common import data_of, wrapped
from tests.workers import WORLD


def on_the_wire(rank: int, wire: torch.dtype) -> tuple[float, dict[str, torch.dtype]]:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, reduce_dtype=wire)
    for x in ((256.0, 1.0), (1.0, 2.0))[rank]:
        step(model, optimizer, torch.tensor(x))
    return model.w.item(), {name: t.dtype for name, t in step.gradients().items()}


def large(rank: int) -> float:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, reduce_dtype=torch.float16)
    for _ in range(2):
        step(model, optimizer, torch.tensor(40000.0))
    return model.w.item()


def compressed(rank: int, hook: str) -> dict[str, Any]:
    """DDP with torch's own compression hook: ours, and eager DDP with that hook."""
    ours = mlp()
    eager = copy.deepcopy(ours)
    plain = quick(plain_step, 2)
    third = copy.deepcopy(ours)
    found = []
    for net in (ours, eager):
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, getattr(default_hooks, hook))
        found.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    data = data_of(rank, 3, 2)
    step = quick(plain_step, 2)
    drive(step, *found[0], data)
    accumulation(*found[1], data)
    drive(plain, third, torch.optim.SGD(third.parameters(), lr=0.1), data)
    return {
        "ours": [p.detach() for p in ours.parameters()],
        "eager": [p.detach() for p in eager.parameters()],
        "bytes": step.report().bytes_after,
        "plain_bytes": plain.report().bytes_after,
    }


class Spectral(nn.Module):
    """Complex weights and a real bias."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(8, 3, dtype=torch.complex64))
        self.b = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) @ self.w).abs() + self.b


def spectral_loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def complex_numbers(rank: int, wrap: str, options: dict[str, Any]) -> dict[str, Any]:
    """Two windows with complex parameters, beside one process with the batches of both ranks."""
    ours, whole = twins(Spectral())
    model = wrapped(ours, wrap)
    optimizer, plain = sgd(ours), sgd(whole)
    step = gradsync_fx.optimize(step_of(spectral_loss), gradient_accumulation_steps=2, **options)
    data = [
        torch.randn(2, 2, 4, 8, generator=torch.Generator().manual_seed(r)) for r in range(WORLD)
    ]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*complex.*")
        for n in range(2):
            for x in data[rank][n]:
                step(model, optimizer, x)
            spectral_loss(whole, torch.cat([d[n].flatten(0, 1) for d in data])).backward()
            plain.step()
            plain.zero_grad()
        equal = step.self_check(model, optimizer, data[rank][0][0]).equal
    return {
        "ours": [p.detach() for p in ours.parameters()],
        "whole": [p.detach() for p in whole.parameters()],
        "sums": {name: total.dtype for name, total in step.gradients().items()},
        "equal": equal,
    }


def float16_wire(
    rank: int, gradients: tuple[float, float], weight: float, options: dict[str, Any]
) -> float:
    """The window's gradient of a weight, where every micro-step of a rank gives the same gradient."""
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)

    def train_step(x: torch.Tensor) -> None:
        if options.get("reduction") == "weighted":
            gradsync_fx.micro_batch_weight(weight)
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=4, reduce_dtype=torch.float16, **options
    )
    for _ in range(4):
        step(torch.tensor(gradients[rank]))
    return -model.w.item()
