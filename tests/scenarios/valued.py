"""Per-sample clipped gradients, assigned to `.grad`, on two ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.counting import counted
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import twins
from tests.scenarios.common import data_of
from tests.workers import WORLD


def end(optimizer: Any) -> None:
    optimizer.step()
    optimizer.zero_grad()


def per_sample(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """Each row's gradient clipped by itself."""
    params = {n: p.detach() for n, p in model.named_parameters()}

    def loss_of(p: dict[str, Tensor], a: Tensor, b: Tensor) -> Tensor:
        return nn.functional.mse_loss(functional_call(model, p, (a[None],)), b[None])

    grads = vmap(grad(loss_of), in_dims=(None, 0, 0))(params, x, y)
    norm = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
    scale = (0.5 / norm.clamp(min=1e-6)).clamp(max=1.0)
    for name, p in model.named_parameters():
        p.grad = torch.einsum("i,i...->...", scale, grads[name]) / len(x)
    end(optimizer)
    return norm.mean()


def private(rank: int) -> dict[str, Any]:
    """Two windows of two: ours under DDP, and one process with all rows, each clipped by itself, too."""
    ours, whole = twins(mlp())
    model = DistributedDataParallel(ours)
    optimizer, plain = sgd(ours), sgd(whole)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return per_sample(model.module, optimizer, x, y)

    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
    data = [data_of(r, 2, 2) for r in range(WORLD)]
    counts = []
    for n in range(2):
        for batch in data[rank][n]:
            with counted() as one:
                step(*batch)
            counts.append(one.all_reduces)
        rows = [b for r in range(WORLD) for b in data[r][n]]
        per_sample(whole, plain, *(torch.cat(part) for part in zip(*rows, strict=True)))
    return {
        "ours": [p.detach() for p in ours.parameters()],
        "whole": [p.detach() for p in whole.parameters()],
        "all_reduces": counts,
    }
