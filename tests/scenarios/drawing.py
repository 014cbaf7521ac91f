"""Ranks that draw apart: each leaves out other layers of the same model, at other calls."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import AdamW

import gradsync_fx
from tests.drive import plain_step


K, CALLS = 3, 3 * 3 + 2  # three windows, and one that a flush closes


class Dropped(nn.Module):
    """Layers that may be left out, by Python's numbers, torch's, or those of a generator of the model's own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 1)
        self.how, self.own = how, random.Random()

    def leaves_out(self) -> Any:
        if self.how == "python":
            return random.random() < 0.5
        if self.how == "own":
            return self.own.choice([True, False])
        return torch.rand([]) < 0.5

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.leaves_out():
                x = x + layer(x).tanh()
        return self.head(x) * random.uniform(0.5, 1.5)


def _seed(rank: int, model: Dropped) -> None:
    random.seed(10 + rank)
    torch.manual_seed(20 + rank)
    model.own.seed(30 + rank)


def _states(model: Dropped) -> list[Any]:
    return [random.getstate(), model.own.getstate(), torch.get_rng_state().tolist()]


def _batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source))
        for _ in range(CALLS)
    ]


def _eagerly(rank: int, model: Dropped) -> list[float]:
    """Plain PyTorch: gradients are summed, and exchanged by hand where a window ends."""
    optimizer, losses = AdamW(model.parameters(), lr=0.02), []
    for number, (x, y) in enumerate(_batches(rank), 1):
        loss = F.mse_loss(model(x), y)
        loss.backward()
        losses.append(float(loss.detach()))
        if number % K and number < CALLS:
            continue
        terms = (number - 1) % K + 1
        for p in model.parameters():
            there = torch.tensor(float(p.grad is not None))
            dist.all_reduce(there)
            if there:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                dist.all_reduce(p.grad)
                p.grad /= terms * dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
    return losses


def drawn(rank: int, how: str, options: dict[str, Any]) -> dict[str, Any]:
    """Ours and eager's losses, parameters and states of generators; and what a check of the step says."""
    torch.manual_seed(0)
    model = Dropped(how)
    plain = copy.deepcopy(model)
    _seed(rank, plain)
    wanted = _eagerly(rank, plain), list(plain.parameters()), _states(plain)
    _seed(rank, model)
    optimizer = AdamW(model.parameters(), lr=0.02)
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=K, **options)
    losses = [float(step(model, optimizer, *batch)) for batch in _batches(rank)]
    step.flush()
    ours = losses, list(model.parameters()), _states(model)
    verdict = step.self_check(model, optimizer, *_batches(rank)[0])
    return {
        "losses": (ours[0], wanted[0]),
        "values": ([p.detach() for p in ours[1]], [p.detach() for p in wanted[1]]),
        "same states": ours[2] == wanted[2] == _states(model),
        "verdict": str(verdict),
        "passed": verdict.equal,
        "captures": step.compile_count,
    }
