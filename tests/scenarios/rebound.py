"""Tensors that a step puts in the place of others, beside plain PyTorch that does so once per update."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync_fx


K, CALLS = 2, 2 * 2 + 1  # two windows, and one that a flush closes


class Trainer:
    """What a script keeps between calls."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        self.net.register_buffer("slow", torch.zeros(8))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.2, momentum=0.5)
        self.average = torch.zeros(8)
        self.kept: dict[str, Tensor] = {"old": torch.zeros(8)}
        self.row = [torch.zeros(8), torch.zeros(1)]
        self.norm, self.count, self.first = torch.ones(()), torch.zeros(()), None

    def bias(self) -> Tensor:
        return self.net[0].bias.detach()  # type: ignore[union-attr, operator]

    def observed(self) -> dict[str, Any]:
        found = {name: t.detach().clone() for name, t in self.net.state_dict().items()}
        found |= {"average": self.average, "norm": self.norm, "count": self.count.clone()}
        found |= {f"kept.{key}": t for key, t in self.kept.items()}
        found |= {f"row.{i}": t.clone() for i, t in enumerate(self.row)}
        return found if self.first is None else found | {"first": self.first}


After = Callable[[Trainer], None]


def average(of: Trainer) -> None:
    of.average = 0.9 * of.average + 0.1 * of.bias()


def key(of: Trainer) -> None:
    of.kept["old"] = 0.9 * of.kept["old"] + 0.1 * of.bias()


def new_key(of: Trainer) -> None:
    of.kept["new"] = 0.9 * of.kept["new"] + of.bias() if "new" in of.kept else of.bias().clone()


def item(of: Trainer) -> None:
    of.row[0] = 0.9 * of.row[0] + 0.1 * of.bias()


def buffer(of: Trainer) -> None:
    of.net.slow = 0.9 * of.net.slow + 0.1 * of.bias()  # type: ignore[operator]


def first_of_all(of: Trainer) -> None:
    of.first = of.bias().clone() if of.first is None else 0.9 * of.first + of.bias()


def counted(of: Trainer) -> None:
    of.count = of.count + 1
    of.average = of.average + (of.bias() - of.average) / of.count


def norm(of: Trainer) -> None:
    """Before the update: gradients are scaled to the average of their norms."""
    now = torch.nn.utils.get_total_norm([p.grad for p in of.net.parameters() if p.grad is not None])
    of.norm = 0.9 * of.norm + 0.1 * now
    for p in of.net.parameters():
        p.grad.mul_((of.norm / now).clamp(max=1.0))  # type: ignore[union-attr]


def made_anew(of: Trainer) -> None:
    of.row = [0.9 * of.row[0] + 0.1 * of.bias(), of.row[1] + 1.0]


FORMS: dict[str, After] = {
    f.__name__: f
    for f in (average, key, new_key, item, buffer, first_of_all, counted, norm, made_anew)
}


def batches(rank: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(rank)
    return [
        (torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source))
        for _ in range(CALLS)
    ]


def _update(of: Trainer, form: After) -> None:
    if form is norm:
        form(of)
    of.optimizer.step()
    if form is not norm:
        form(of)
    of.optimizer.zero_grad()


def plainly(rank: int, form: After) -> list[dict[str, Any]]:
    """After each call, and after the flush."""
    of, found = Trainer(), []
    world = dist.get_world_size() if dist.is_initialized() else 1
    for number, (x, y) in enumerate(batches(rank), 1):
        F.mse_loss(of.net(x), y).backward()
        if number == CALLS:
            found.append(of.observed())
        if number % K == 0 or number == CALLS:
            for p in of.net.parameters():
                assert p.grad is not None
                if world > 1:
                    dist.all_reduce(p.grad)
                p.grad /= world * ((number - 1) % K + 1)
            _update(of, form)
        if number != CALLS:
            found.append(of.observed())
    return [*found, of.observed()]


def optimized(
    rank: int, form: After, *, eager: bool = False, **options: Any
) -> list[dict[str, Any]]:
    of, found = Trainer(), []

    def train_step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(of.net(x), y)
        loss.backward()
        if eager and float(loss.detach()) > 1e9:
            raise AssertionError("a branch on a value: no program holds it")
        _update(of, form)
        return loss

    unsupported: Any = "eager" if eager else "error"
    warnings.filterwarnings("ignore", "the step runs eagerly")
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=K, on_unsupported=unsupported, **options
    )
    for x, y in batches(rank):
        step(x, y)
        found.append(of.observed())
    step.flush()
    return [*found, of.observed()]


def compare(ours: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    assert len(ours) == len(plain)
    for call, (mine, theirs) in enumerate(zip(ours, plain, strict=True), 1):
        assert mine.keys() == theirs.keys(), call
        for name, value in theirs.items():
            near = torch.allclose(mine[name], value, rtol=2e-4, atol=1e-6)
            assert near, f"{name} after call {call}: {mine[name]} beside {value}"


def beside_plain(rank: int, name: str, eager: bool, options: dict[str, Any]) -> dict[str, Tensor]:
    """One rank of several; what it holds in the end."""
    form = FORMS[name]
    ours = optimized(rank, form, eager=eager, broadcast_buffers="never", **options)
    compare(ours, plainly(rank, form))
    return {n: t for n, t in ours[-1].items() if "running" not in n and "batches" not in n}
