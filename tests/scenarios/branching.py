"""Two models with the same names inside, in a step whose branches meet them in different order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.optimizers import sgd
from tests.scenarios.disagreement import refusal


def pair() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))


def inputs(count: int, rank: int = 0) -> list[Tensor]:
    source = torch.Generator().manual_seed(rank)
    return [torch.randn(4, 2, generator=source) for _ in range(count)]


def step_of(first: nn.Module, second: nn.Module) -> Callable[..., Any]:
    of_first, of_second = sgd(first), sgd(second)

    def step(branch: str, x: Tensor) -> Tensor:
        made = second(first(x)) if branch == "first" else first(second(x))
        loss: Tensor = made.pow(2).mean()
        loss.backward()
        of_first.step()
        of_second.step()
        of_first.zero_grad()
        of_second.zero_grad()
        return loss

    return step


ORDERS = (("first", "second", "second", "first"), ("second", "second", "first", "first"))


def begin_apart(rank: int, backend: str) -> dict[str, Tensor]:
    """Parameters after two windows; rank 0 begins with one branch, rank 1 with the other."""
    first, second = pair()
    run = gradsync_fx.optimize(
        step_of(first, second), gradient_accumulation_steps=2, backend=backend
    )
    for branch, x in zip(ORDERS[rank], inputs(4, rank), strict=True):
        run(branch, x)
    return _named(first, second)


def expected() -> dict[str, Tensor]:
    """The same in plain PyTorch, in one process: the mean of the four terms of each window."""
    first, second = pair()
    update = sgd(nn.ModuleList([first, second]))
    for window in ((0, 1), (2, 3)):
        for rank, call in itertools.product(range(2), window):
            a, b = (first, second) if ORDERS[rank][call] == "first" else (second, first)
            (b(a(inputs(4, rank)[call])).pow(2).mean() / 4).backward()
        update.step()
        update.zero_grad()
    return _named(first, second)


def _named(first: nn.Module, second: nn.Module) -> dict[str, Tensor]:
    both = nn.ModuleDict({"first": first, "second": second})
    return {name: p.detach().clone() for name, p in both.named_parameters()}


WAYS = (("a", "a", "b", "b"), ("b", "b", "plain", "a"))


def normed(rank: int, backend: str, wrapped: bool) -> dict[str, Tensor]:
    """Models with batch statistics, each called in one branch; rank 1 goes other ways than rank 0."""
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2))
    head: nn.Module = nn.Linear(2, 1)
    update = sgd(nn.ModuleList([a, b, head]))
    models = [DistributedDataParallel(m) if wrapped else m for m in (a, b, head)]

    def step(way: str, x: Tensor) -> Tensor:
        hidden = models[0](x) if way == "a" else models[1](x) if way == "b" else x
        loss: Tensor = models[2](hidden).pow(2).mean()
        loss.backward()
        update.step()
        update.zero_grad()
        return loss

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend=backend)
    for way, x in zip(WAYS[rank], inputs(4, rank), strict=True):
        run(way, x)
    run.flush()
    state = nn.ModuleDict({"a": a, "b": b, "head": head}).state_dict()
    return {name: t.detach().clone() for name, t in state.items()}


def statistics() -> dict[str, Tensor]:
    """Those of rank 0 alone, in plain PyTorch: each model's own batches, in order."""
    found = {}
    for way in ("a", "b"):
        norm = nn.BatchNorm1d(2)
        for taken, x in zip(WAYS[0], inputs(4), strict=True):
            if taken == way:
                norm(x)
        found |= {f"{way}.0.{name}": buffer for name, buffer in norm.named_buffers()}
    return found


def trained() -> dict[str, Tensor]:
    """Parameters of the same in plain PyTorch, in one process: the mean of the four terms of each window."""
    torch.manual_seed(0)
    a, b = (nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2)) for _ in range(2))
    head = nn.Linear(2, 1)
    both = nn.ModuleDict({"a": a, "b": b, "head": head})
    update = sgd(both)
    for window in ((0, 1), (2, 3)):
        for rank, call in itertools.product(range(2), window):
            x, way = inputs(4, rank)[call], WAYS[rank][call]
            (head(both[way](x) if way in both else x).pow(2).mean() / 4).backward()
        update.step()
        update.zero_grad()
    return {name: p.detach() for name, p in both.named_parameters()}


def read_only(rank: int, ways: Sequence[str], prepares: bool) -> dict[str, Tensor]:
    """Batch statistics of two models that nobody trains, each called in one branch of the step.

    ways: those of this job's ranks, a letter for each call. prepares: each branch, on all ranks, before training.
    """
    torch.manual_seed(0)
    norms = {name: nn.BatchNorm1d(2) for name in "ab"}
    head = nn.Linear(2, 1)
    update = sgd(head)

    def step(way: str, x: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = norms[way](x)
        loss: Tensor = head(hidden).pow(2).mean()
        loss.backward()
        update.step()
        update.zero_grad()
        return loss

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend="aot_eager")
    if prepares:
        for way in norms:
            run.prepare(way, inputs(1)[0])
    for way, x in zip(ways[rank], inputs(4, rank), strict=True):
        run(way, x)
    run.flush()
    return {f"{way}.running_mean": norm.running_mean.clone() for way, norm in norms.items()}


def read_only_refused(rank: int, ways: Sequence[str]) -> dict[str, Any]:
    return refusal(lambda: read_only(rank, ways, prepares=False))


def means_of(ways: str) -> dict[str, Tensor]:
    """In plain PyTorch: of rank 0's batches alone."""
    norms = {name: nn.BatchNorm1d(2) for name in "ab"}
    for way, x in zip(ways, inputs(4), strict=True):
        norms[way](x)
    return {f"{way}.running_mean": norm.state_dict()["running_mean"] for way, norm in norms.items()}
