"""A model that is large enough to share its buckets in memory, with parameters that have no elements beside."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

import gradsync_fx


class Hollow(nn.Module):
    """More than 1 MiB; two of its dtypes have empty parameters only, or among others."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(512, 600)
        self.nothing = nn.Parameter(torch.zeros(4, 0))
        self.other = nn.Parameter(torch.zeros(0, 3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.wide(x).pow(2).mean() + (x[:, :4] @ self.nothing).sum() + self.other.sum()


def fresh() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = Hollow()
    return model, AdamW(model.parameters(), lr=1e-2)


def inputs(rank: int) -> list[Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 512, generator=source) for _ in range(4)]


def windows(rank: int, options: dict[str, Any]) -> list[Tensor]:
    """Parameters after two windows of two."""
    model, optimizer = fresh()

    def step(x: Tensor) -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, **options)
    for x in inputs(rank):
        run(x)
    return [p.detach().clone() for p in model.parameters()]


def plain() -> list[Tensor]:
    """The same in plain PyTorch, in one process."""
    model, optimizer = fresh()
    for window in ((0, 1), (2, 3)):
        for rank in range(2):
            for call in window:
                (model(inputs(rank)[call]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]
