"""The optimizers that the tests update with: torch's own in many settings, and two that a user might write."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer


Parameters = Iterable[nn.Parameter]


class Counting(Optimizer):
    """Momentum with a warm-up: a user's own optimizer, its counter a Python int, its state made in `step`."""

    def __init__(
        self, params: Parameters, lr: float = 0.1, beta: float = 0.9, warmup: int = 3
    ) -> None:
        super().__init__(params, {"lr": lr, "beta": beta, "warmup": warmup})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta = group["beta"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["average"] = torch.zeros_like(p)
                state["count"] += 1
                state["average"].mul_(beta).add_(p.grad, alpha=1 - beta)
                rate = group["lr"] * min(1.0, state["count"] / group["warmup"])
                p.add_(state["average"] / (1 - beta ** state["count"]), alpha=-rate)


class GroupCounting(Optimizer):
    """A user's own optimizer whose rate falls with a Python int in the parameter group."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["updates"])


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "Adam-l2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW-lr-tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "RMSprop-centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "own": Counting,
    "own-group": GroupCounting,
}


def sgd(model: nn.Module, rate: float = 0.1) -> Optimizer:
    """The plainest: what a test of something else than optimizers takes."""
    return torch.optim.SGD(model.parameters(), lr=rate)


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)
