"""Ranks whose optimizers are not alike, from the start or from some window on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import plain_step, quick
from tests.own_optimizers import Centralised
from tests.scenarios.disagreement import refusal
from tests.scenarios.sharded import Together, batches, held, net


def _groups(model: nn.Module, *, two: bool) -> list[dict[str, Any]]:
    every = list(model.parameters())
    return [{"params": every[:2]}, {"params": every[2:]}] if two else [{"params": every}]


def _hooked(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.register_step_pre_hook(lambda *_: None)
    return optimizer


def _loaded(model: nn.Module) -> Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _plain(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters())


def _turned(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(list(model.parameters())[::-1])


Made = Callable[[nn.Module], Optimizer]
# What rank 0 has and what rank 1 has; a word of the error.
PAIRS: dict[str, tuple[Made, Made, str]] = {
    "class": (_plain, lambda m: torch.optim.SGD(m.parameters()), "SGD with"),
    "own class": (_plain, lambda m: Centralised(m.parameters()), "Centralised with"),
    "momentum": (
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1),
        lambda m: torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9),
        "momentum=0.9",
    ),
    "foreach": (_plain, lambda m: torch.optim.AdamW(m.parameters(), foreach=True), "foreach=True"),
    "fused": (_plain, lambda m: torch.optim.AdamW(m.parameters(), fused=True), "fused=True"),
    "rate": (_plain, lambda m: torch.optim.AdamW(m.parameters(), lr=0.5), "lr=0.5"),
    "tensor rate": (
        lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.5)),
        lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.25)),
        "lr=0.25",
    ),
    "groups": (_plain, lambda m: torch.optim.AdamW(_groups(m, two=True)), "by group: [2, "),
    "fewer": (_plain, lambda m: torch.optim.AdamW(list(m.parameters())[:-1]), "by group"),
    "order": (_plain, _turned, "as parameter 0"),
    "state": (_plain, _loaded, "exp_avg"),
}  # fmt: skip
# Only where updates are divided: without, each rank makes the whole update in its own way.
DIVIDED: dict[str, tuple[Made, Made, str]] = {
    "hooks": (_plain, _hooked, "it has hooks of its step"),
    "together": (lambda m: Together(m.parameters()), _plain, "Together with"),
}


def from_the_start(rank: int, name: str, shard: bool) -> dict[str, Any]:
    """The error of the first window, and what it left."""
    model = net()
    optimizer = {**PAIRS, **DIVIDED}[name][rank](model)
    before, count = held(model), len(optimizer.state)
    step = quick(plain_step, 2, shard_optimizer=shard)
    x, y = batches(4)

    def run() -> None:
        for i in range(2):
            step(model, optimizer, x[2 * i + rank], y[2 * i + rank])

    found = refusal(run)
    same = all(map(torch.equal, before, held(model)))
    return {**found, "same": same and len(optimizer.state) == count, "calls": step.micro_step}


def _toggle_momentum(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["momentum"] = 0.0


def _toggle_direction(optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["maximize"] = True


def _hook(optimizer: Optimizer) -> None:
    optimizer.register_step_pre_hook(lambda *_: None)


def _forget(optimizer: Optimizer) -> None:
    optimizer.state.clear()


CHANGES = {
    "momentum": (_toggle_momentum, "momentum=0.0"),
    "direction": (_toggle_direction, "maximize=True"),
    "hook": (_hook, "it has hooks of its step"),
    "state": (_forget, "nothing as state of parameter 0"),
}


def later(rank: int, name: str, how: str) -> dict[str, Any]:
    """Divided updates of which rank 1 changes its own after two windows; the window ends in a call, or for some without
    data."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = quick(plain_step, 2, shard_optimizer=True)
    x, y = batches(16)

    def window(number: int) -> None:
        for i in range(2 * number, 2 * number + 2):
            if how == "skips" and number == 2 and i % 2 and rank == 0:
                step.skip()
            else:
                step(model, optimizer, x[2 * i + rank], y[2 * i + rank])

    for number in range(2):
        window(number)
    before = held(model)
    if rank == 1:
        CHANGES[name][0](optimizer)
    found = refusal(lambda: window(2))
    return {
        **found,
        "same": all(map(torch.equal, before, held(model))),
        "updates": step.optimizer_step,
    }


def other_option(rank: int) -> dict[str, Any]:
    """Rank 1 divides, rank 0 does not."""
    model = net()
    optimizer = _plain(model)
    before = held(model)
    step = quick(plain_step, 1, shard_optimizer=rank == 1)
    x, y = batches(2)
    found = refusal(lambda: step(model, optimizer, x[rank], y[rank]))
    return {**found, "same": all(map(torch.equal, before, held(model)))}


def way_out(rank: int) -> list[Tensor]:
    """After the error: alike on all ranks, in a step of their own."""
    model = net()
    optimizer = PAIRS["momentum"][rank](model)
    x, y = batches(4)
    step = quick(plain_step, 1, shard_optimizer=True)
    assert refusal(lambda: step(model, optimizer, x[rank], y[rank]))["type"] != "nothing"
    optimizer.param_groups[0]["momentum"] = 0.9
    step(model, optimizer, x[rank], y[rank])
    step(model, optimizer, x[2 + rank], y[2 + rank])
    return held(model)
