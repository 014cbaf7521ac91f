"""A recurrent layer trained over sequences that follow each other: captured, and in plain PyTorch on all data."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.workers import WORLD


K, WINDOWS = 2, 3


class Reader(nn.Module):
    """One of torch's recurrent layers, and a linear one."""

    def __init__(self, kind: str, **how: Any) -> None:
        super().__init__()
        self.layer = getattr(nn, kind)(8, 6, **how)
        self.out = nn.Linear(12 if how.get("bidirectional") else 6, 1)

    def forward(self, x: Tensor, state: Any) -> tuple[Tensor, Any]:
        read, state = self.layer(x, state)
        return self.out(read), state


def _detached(state: Any) -> Any:
    return tuple(t.detach() for t in state) if isinstance(state, tuple) else state.detach()


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, state: Any) -> Any:
    out, state = model(x, state)
    loss = F.mse_loss(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss, _detached(state)


def both(rank: int | None, kind: str, how: dict[str, Any], backend: str) -> Any:
    """The parameters of both ways; the hidden state goes on from micro-step to micro-step, for each rank its own."""
    torch.manual_seed(0)
    ours = Reader(kind, **how)
    eager = copy.deepcopy(ours)
    optimizer, reference = (torch.optim.Adam(m.parameters(), lr=0.01) for m in (ours, eager))
    run = gradsync_fx.optimize(step, gradient_accumulation_steps=K, backend=backend)
    world = 1 if rank is None else WORLD
    state: Any = None
    states: list[Any] = [None] * world
    for _ in range(WINDOWS):
        for _ in range(K):
            data = [(torch.randn(5, 5, 8), torch.randn(5, 5, 1)) for _ in range(world)]
            _, state = run(ours, optimizer, *data[rank or 0], state)
            for i, (x, y) in enumerate(data):
                out, following = eager(x, states[i])
                (F.mse_loss(out, y) / (K * world)).backward()
                states[i] = _detached(following)
        reference.step()
        reference.zero_grad()
    return [[p.detach() for p in m.parameters()] for m in (ours, eager)]
