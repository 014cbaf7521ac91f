"""Independent eager references, and the little models and optimizers that tests share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx


Batch = tuple[Tensor, Tensor]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))


def batches(count: int, rows: int = 4, seed: int = 1) -> list[Batch]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(rows, 8, generator=generator), torch.randn(rows, 1, generator=generator))
        for _ in range(count)
    ]


def plain_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def eager_accumulation(
    model: nn.Module,
    optimizer: Optimizer,
    data: Sequence[Batch],
    k: int,
    before_update: Callable[[], Any] = lambda: None,
    after_update: Callable[[], Any] = lambda: None,
) -> list[Tensor]:
    """The loop that people write by hand; returns the loss of every micro-step."""
    losses = []
    for i, (x, y) in enumerate(data):
        loss = F.mse_loss(model(x), y)
        (loss / k).backward()
        losses.append(loss.detach())
        if (i + 1) % k == 0:
            before_update()
            optimizer.step()
            optimizer.zero_grad()
            after_update()
    return losses


def largest_difference(a: nn.Module, b: nn.Module) -> float:
    return max(
        (x.detach().double() - y.detach().double()).abs().max().item()
        for x, y in zip(a.state_dict().values(), b.state_dict().values(), strict=True)
    )


def twins(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    model = make()
    return model, copy.deepcopy(model)


def optimized(step: Callable[..., Any], k: int, **options: Any) -> Any:
    options.setdefault("backend", "aot_eager")
    return gradsync_fx.optimize(step, gradient_accumulation_steps=k, **options)


class Counting(Optimizer):
    """A user's optimizer: state made in the first step, a Python counter, bias correction from it."""

    def __init__(self, parameters: Any, lr: float = 0.05, beta: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["mean"] = torch.zeros_like(p)
                state["count"] += 1
                state["mean"].mul_(group["beta"]).add_(p.grad, alpha=1 - group["beta"])
                p.add_(state["mean"], alpha=-group["lr"] / (1 - group["beta"] ** state["count"]))
