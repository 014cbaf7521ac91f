"""Refusals of updates that cannot be shared out among ranks, and what their errors say to do."""

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
from tests.scenarios.sharded import batches, made, net, refusal


class OwnStates(torch.optim.SGD):
    """Saves in a way of its own."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "kind": "own"}


class Toggled(Optimizer):
    """Element by element, until it is told to look at the whole tensor."""

    def __init__(self, params: Any, *, whole: bool = False) -> None:
        super().__init__(params, {"lr": 0.1, "whole": whole})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                scale = p.grad.norm() + 1.0 if group["whole"] else 1.0
                p.sub_(p.grad / scale, alpha=group["lr"])


def flattened(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Reduces all gradients itself, in one tensor."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    sizes = [p.numel() for p in model.parameters()]
    for p, piece in zip(model.parameters(), flat.split(sizes), strict=True):
        p.grad.copy_(piece.view_as(p))
    optimizer.step()
    optimizer.zero_grad()
    return loss


class Rank:
    """A model, an optimizer, and two micro-steps of them."""

    def __init__(self, rank: int, optimizer: Any) -> None:
        self.model, (self.x, self.y), self.rank = net(), batches(8), rank
        self.optimizer: Optimizer = (
            made(optimizer, self.model)
            if isinstance(optimizer, str)
            else optimizer(self.model.parameters())
        )

    def two(self, step: Any) -> bool:
        """Whether they trained anything."""
        before = [p.detach().clone() for p in self.model.parameters()]
        for i in range(2):
            step(self.model, self.optimizer, self.x[i + self.rank], self.y[i + self.rank])
        return any(
            not torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True)
        )


def left_out(rank: int, name: str) -> tuple[str, bool]:
    """The option, or what does not go with it, is left out."""
    kinds: dict[str, tuple[Any, Any, Any, dict[str, Any]]] = {
        "together": ("Together", plain_step, plain_step, {"shard_optimizer": False}),
        "opaque": ("Looking", plain_step, plain_step, {"shard_optimizer": False}),
        "own states": (OwnStates, plain_step, plain_step, {"shard_optimizer": False}),
        "flat": ("AdamW", flattened, plain_step, {"shard_optimizer": True}),
    }
    kind, function, other, options = kinds[name]
    mine = Rank(rank, kind)
    text = refusal(lambda: mine.two(quick(function, 2, shard_optimizer=True)))
    with warnings.catch_warnings():  # of an update that runs as it is
        warnings.simplefilter("ignore", gradsync_fx.GradSyncWarning)
        return text, mine.two(quick(other, 2, **options))


def another_kind(rank: int) -> tuple[str, bool]:
    """The state is taken on all ranks, and loaded into a new optimizer."""
    mine = Rank(rank, Toggled)
    step = quick(plain_step, 2, shard_optimizer=True)
    mine.two(step)
    mine.optimizer.param_groups[0]["whole"] = True
    text = refusal(lambda: mine.two(step))
    state = mine.optimizer.state_dict()
    mine.optimizer = Toggled(mine.model.parameters(), whole=True)
    mine.optimizer.load_state_dict(state)
    return text, mine.two(quick(plain_step, 2, shard_optimizer=True))


def another_group(rank: int) -> tuple[str, bool]:
    """Of four ranks: two steps over other groups by one optimizer; then a new one for the second."""
    mine = Rank(rank, "AdamW")
    mine.two(quick(plain_step, 2, shard_optimizer=True))
    state = copy.deepcopy(mine.optimizer.state_dict())
    pairs, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
    assert pairs is not None
    options: dict[str, Any] = {"shard_optimizer": True, "process_group": pairs}
    text = refusal(lambda: mine.two(quick(plain_step, 2, **options)))
    mine.optimizer = made("AdamW", mine.model)
    mine.optimizer.load_state_dict(state)
    return text, mine.two(quick(plain_step, 2, **options))


def unlike(rank: int) -> tuple[str, bool]:
    """A state that was loaded on one rank only; then it is loaded on both."""
    mine = Rank(rank, "AdamW")
    step = quick(plain_step, 2, shard_optimizer=True)
    step.prepare(mine.model, mine.optimizer, mine.x[0], mine.y[0])
    mine.two(step)
    state = copy.deepcopy(mine.optimizer.state_dict())
    if rank:
        for held in mine.optimizer.state.values():
            held["more"] = held["exp_avg"].clone()
    text = refusal(mine.optimizer.state_dict)
    mine.optimizer.load_state_dict(state)
    return text, len(mine.optimizer.state_dict()["state"]) == len(state["state"])


def apart(rank: int) -> tuple[str, bool]:
    """Rank 0 asks for the state while rank 1 trains; in the next run both ask for it."""

    def run(*, alone: bool) -> dict[str, Any]:
        mine = Rank(rank, "AdamW")
        step = quick(plain_step, 2, shard_optimizer=True, rank_timeout=5.0)
        mine.two(step)
        if alone and rank:
            mine.two(step)
        return mine.optimizer.state_dict()

    text = refusal(lambda: run(alone=True))
    return text, bool(run(alone=False)["state"])


def pieces(rank: int) -> tuple[list[str], bool]:
    """Of an optimizer that is not divided yet, and of a state with other groups."""
    mine = Rank(rank, "AdamW")
    early = refusal(lambda: gradsync_fx.OptimizerShards(mine.optimizer))
    step = quick(plain_step, 2, shard_optimizer=True)
    step.prepare(mine.model, mine.optimizer, mine.x[0], mine.y[0])
    shards = gradsync_fx.OptimizerShards(mine.optimizer)
    mine.two(step)
    state = shards.state_dict()
    groups = [{**state["param_groups"][0], "params": [0]}]
    wrong = refusal(lambda: shards.load_state_dict({**state, "param_groups": groups}))
    shards.load_state_dict(state)
    return [early, wrong], mine.two(step)
