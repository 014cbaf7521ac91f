"""What one of two ranks does with an optimizer whose own step runs as it is."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.own_optimizers import OPAQUE, Counts
from tests.reference import regression
from tests.scenarios.common import wrapped


def _model() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def windows(rank: int, name: str, backend: str, wrap: str) -> dict[str, Any]:
    """Two windows of two, and a third that the data of rank 1 ends in."""
    model = _model()
    optimizer = OPAQUE[name](model)
    whole = wrapped(model, wrap)
    step = quick(plain_step, 2, backend=backend)
    batches = [batch for window in regression(3, 2, seed=rank) for batch in window]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* runs as it is")
        for batch in batches[: 6 - rank]:
            step(whole, optimizer, *batch)
        step.flush()
    return {
        "parameters": [p.detach().clone() for p in model.parameters()],
        "updates": step.optimizer_step,
    }


def reference(name: str) -> list[Tensor]:
    """What one process makes of both ranks' data: 2, 2 and 2 micro-steps of rank 0, 2, 2 and 1 of rank 1."""
    model = _model()
    optimizer = OPAQUE[name](model)
    both = [regression(3, 2, seed=rank) for rank in (0, 1)]
    both[1][2].pop()
    for together in zip(*both, strict=True):
        batches = [batch for window in together for batch in window]
        for x, y in batches:
            (F.mse_loss(model(x), y) / len(batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def zero_redundancy(rank: int, k: int) -> dict[str, Any]:
    """torch's own sharded optimizer, which hands each rank's parameters to the others in its step."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.distributed.optim warns when it is imported
        from torch.distributed.optim import ZeroRedundancyOptimizer

        ours, theirs = _model(), _model()
        sharded = ZeroRedundancyOptimizer(ours.parameters(), torch.optim.AdamW, lr=1e-2)
        plain = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
        step = quick(plain_step, k)
        data = regression(3, k, seed=rank)
        for batch in (batch for window in data for batch in window):
            step(ours, sharded, *batch)
        for window in data:
            for x, y in window:
                (F.mse_loss(theirs(x), y) / k).backward()
            for p in theirs.parameters():
                dist.all_reduce(p.grad)
                p.grad.div_(2)  # type: ignore[union-attr]
            plain.step()
            plain.zero_grad()
    return {
        "ours": [p.detach().clone() for p in ours.parameters()],
        "theirs": [p.detach().clone() for p in theirs.parameters()],
    }


def _losses(nets: nn.ModuleDict, z: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    fake = nets["g"](z)
    d = F.softplus(-nets["d"](x)).mean() + F.softplus(nets["d"](fake.detach())).mean()
    return d, fake


def _gan_step(nets: nn.ModuleDict, d: Optimizer, g: Optimizer, z: Tensor, x: Tensor) -> Tensor:
    loss, fake = _losses(nets, z, x)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(nets["d"].parameters(), 0.5)
    d.step()
    with torch.no_grad():
        for p in nets["d"].parameters():
            p.clamp_(-0.3, 0.3)
    d.zero_grad()
    g.zero_grad()
    F.softplus(-nets["d"](fake)).mean().backward()
    g.step()
    g.zero_grad()
    d.zero_grad()
    return loss


def gan(rank: int, k: int, backend: str) -> dict[str, Any]:
    """A GAN whose discriminator's update is opaque, beside the same by hand."""
    torch.manual_seed(0)
    ours = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),
            "d": nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)),
        }
    )
    with torch.no_grad():
        for p in ours["d"].parameters():
            p.clamp_(-0.3, 0.3)  # as each update leaves them: what an accumulate call sees, too
    theirs = copy.deepcopy(ours)
    mine, other = (
        (Counts(n["d"].parameters(), lr=0.2), torch.optim.SGD(n["g"].parameters(), 0.1, 0.5))
        for n in (ours, theirs)
    )
    step = gradsync_fx.optimize(_gan_step, gradient_accumulation_steps=k, backend=backend)
    source = torch.Generator().manual_seed(10 + rank)
    for _ in range(3):
        window = [
            (torch.randn(6, 4, generator=source), torch.randn(6, 3, generator=source))
            for _ in range(k)
        ]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".* runs as it is")
            for batch in window:
                step(ours, *mine, *batch)
        _gan_window(theirs, *other, window)
    return {
        "ours": [p.detach().clone() for p in ours.parameters()],
        "theirs": [p.detach().clone() for p in theirs.parameters()],
    }


def _gan_window(nets: nn.ModuleDict, d: Optimizer, g: Optimizer, window: Any) -> None:
    """A window by hand: the generator's last micro-step, and no other, sees the discriminator's update."""
    k, held = len(window), []
    g_parameters = list(nets["g"].parameters())
    terms = [torch.zeros_like(p) for p in g_parameters]
    for z, x in window:
        loss, fake = _losses(nets, z, x)
        held.append(fake)
        (loss / k).backward()
    for p in nets["d"].parameters():
        dist.all_reduce(p.grad)
        p.grad.div_(2)  # type: ignore[union-attr]
    for i, fake in enumerate(held):
        if i == k - 1:
            torch.nn.utils.clip_grad_norm_(nets["d"].parameters(), 0.5)
            d.step()
            with torch.no_grad():
                for p in nets["d"].parameters():
                    p.clamp_(-0.3, 0.3)
        loss = F.softplus(-nets["d"](fake)).mean() / k
        for total, term in zip(terms, torch.autograd.grad(loss, g_parameters), strict=True):
            total.add_(term)
    for p, total in zip(g_parameters, terms, strict=True):
        dist.all_reduce(total)
        p.grad = total.div_(2)
    g.step()
    g.zero_grad()
    d.zero_grad()
