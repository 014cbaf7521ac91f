"""Checks of gpu_check.py that several ranks make together: updates that are shared out, refused, gathered later.

On one rank (NCCL joins one where there is one card) nothing is shared out; the same lines are told of that.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gradsync_fx
from twins import WINDOW, Case, accumulated, eager, start_of, values
from verdicts import Line, at_most, distance, equal


COUNT = 3 * WINDOW
CASES = (Case("gpt"), Case("gpt", clip=True, weights=True))
SMALL = {"bucket_cap_mb": 1.0}  # several buckets


def differs_from_rank_0(parameter: Tensor) -> bool:
    """Every rank asks."""
    other = parameter.clone()
    dist.broadcast(other, 0)
    return not torch.equal(parameter, other)


def check_shares(device: torch.device, over: str, **more: Any) -> Iterator[Line]:
    """With `shard_optimizer`: equal parameters on all ranks, near those of the eager loop, and a part of the state."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        for wire in (None, torch.bfloat16):
            options = {**SMALL, **more, "shard_optimizer": True, "reduce_dtype": wire}
            found = accumulated(case, device, COUNT, rank, **options)
            what = f"{case}, rank {rank} of {world} over {over}, wire {wire}"
            apart = sum(map(differs_from_rank_0, found))
            yield equal(f"{what}, parameters that differ from rank 0's", apart, 0)
            wanted = eager(case, device, COUNT, rank)
            yield at_most(what, distance(found, wanted, start_of(case)), 0.1 if wire else 1e-2)
    yield _state(device, rank, world, more)


def _state(device: torch.device, rank: int, world: int, more: dict[str, Any]) -> Line:
    """Bytes of the optimizer's state here, beside those of the whole."""
    case = CASES[0]
    model, optimizer, _ = case.parts(device)
    step = gradsync_fx.optimize(case.step(), **case.options, **SMALL, **more, shard_optimizer=True)
    for call in case.calls(device, WINDOW, rank):
        step(model, optimizer, *call)
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, Tensor)]
    here = sum(v.numel() * v.itemsize for v in held if v.dim() and v.device.type != "meta")
    whole = 2 * sum(p.numel() * p.itemsize for p in model.parameters())  # two moments
    return at_most(f"rank {rank} of {world}, share of the state", here / whole, 1.1 / world)


def check_votes(device: torch.device, over: str, **more: Any) -> Iterator[Line]:
    """With `commit`: the second update of three is refused by the last rank. It leaves all parameters as they were,
    and the third is what it would be behind the first.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    for shares in (False, True):
        case, asked, kept = CASES[0], [], []

        def commit(asked: list[int] = asked) -> bool:
            asked.append(1)
            return len(asked) != 2 or rank < world - 1

        model, optimizer, scheduler = case.parts(device)
        step = gradsync_fx.optimize(
            case.step(), **case.options, **SMALL, **more, shard_optimizer=shares, commit=commit
        )
        for i, call in enumerate(case.calls(device, COUNT, rank), 1):
            step(model, optimizer, *call)
            if i % WINDOW == 0:
                kept.append(values(model))
            if step.sync_gradients:
                scheduler.step()
        what = f"{case}, rank {rank} of {world} over {over}, shard_optimizer={shares}"
        moved = [not all(map(torch.equal, a, b)) for a, b in zip(kept, kept[1:], strict=False)]
        yield equal(f"{what}, updates made behind the first", moved, [False, True])
        wanted = _without_the_second(case, device, rank)
        yield at_most(what, distance(kept[-1], wanted, start_of(case)), 1e-2)
        apart = sum(map(differs_from_rank_0, kept[-1]))
        yield equal(f"{what}, parameters that differ from rank 0's", apart, 0)


def _without_the_second(case: Case, device: torch.device, rank: int) -> list[Tensor]:
    """The same windows in plain PyTorch, without that one."""
    model, optimizer, scheduler = case.parts(device)
    loss_of, calls = case.loss(), case.calls(device, COUNT, rank)
    for window in (calls[:WINDOW], calls[2 * WINDOW :]):
        for batch, _, factor in window:
            loss_of(model, batch, factor).backward()
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= WINDOW * dist.get_world_size()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return values(model)


def check_hidden(device: torch.device, over: str, **more: Any) -> Iterator[Line]:
    """With `overlap_param_gather`: to the bit what it is without, when the last gathers have ended."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for case in CASES:
        options = {**SMALL, **more, "shard_optimizer": True}
        later = accumulated(case, device, COUNT, rank, **options, overlap_param_gather=True)
        at_once = accumulated(case, device, COUNT, rank, **options)
        what = f"{case}, rank {rank} of {world} over {over}"
        off = sum(not torch.equal(a, b) for a, b in zip(later, at_once, strict=True))
        yield equal(f"{what}, parameters that differ from those gathered at once", off, 0)
        wanted = eager(case, device, COUNT, rank)
        yield at_most(what, distance(later, wanted, start_of(case)), 1e-2)
