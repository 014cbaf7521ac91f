"""Windows of which some are refused between their halves, beside the same windows by hand in plain eager PyTorch."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.scenarios.sharded import Looking


K = 2
Ballots = Sequence[Sequence[bool | str]]  # by update, then by rank: yes, no, or what is raised
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "Looking": Looking,  # runs as it is, between two stages of the program
    "Muon": lambda p: torch.optim.Muon([q for q in p if q.dim() == 2], lr=1e-2),
}


class Votes:
    """What one rank says, one update after the other."""

    def __init__(self, ballots: Ballots, rank: int) -> None:
        self._said, self.asked = [row[rank] for row in ballots], 0

    def __call__(self) -> bool:
        said = self._said[self.asked]
        self.asked += 1
        if isinstance(said, str):
            raise RuntimeError(said)
        return said


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 3)
    )


def _batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(6, 8, generator=source), torch.randint(0, 3, (6,), generator=source)


def _alike(rank: int, world: int, name: str, more: dict[str, Any]) -> tuple[Any, ...]:
    model = _model()
    optimizer = OPTIMIZERS[name](model.parameters())
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
    return model, optimizer, scheduler


def _step(
    model: nn.Module, optimizer: Optimizer, scheduler: Any, x: Tensor, y: Tensor, clip: float
) -> tuple[Tensor, Tensor]:
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss, norm


def ours(
    rank: int,
    world: int,
    name: str,
    ballots: Ballots,
    more: dict[str, Any],
    *,
    flushed: bool = False,
) -> dict[str, Any]:
    """One window for each ballot; flushed: the last one ends without its last micro-step."""
    model, optimizer, scheduler = _alike(rank, world, name, more)
    votes, updates = Votes(ballots, rank), []
    step = gradsync_fx.optimize(
        _step, gradient_accumulation_steps=K, commit=votes, bucket_cap_mb=1e-3, **more
    )
    found: dict[str, Any] = {
        "parameters": [],
        "synced": [],
        "raised": [],
        "norms": [],
        "counts": [],
    }

    def end(call: Callable[[], Any]) -> None:
        raised = ""
        try:
            result = call()
        except RuntimeError as failure:
            raised, result = str(failure), None
        found["raised"].append(raised)
        found["norms"].append(float(result[1]) if result else None)
        found["synced"].append(step.sync_gradients)
        found["counts"].append((step.micro_step, step.optimizer_step, step.pending))
        found["parameters"].append([p.detach().clone() for p in model.parameters()])

    for window in range(len(ballots)):
        for number in range(K):
            x, y = _batch(rank, K * window + number)
            if number < K - 1:
                step(model, optimizer, scheduler, x, y, 0.5)
            elif flushed and window == len(ballots) - 1:
                end(lambda: step.flush(on_update=lambda: updates.append(1)))
            else:
                end(lambda: step(model, optimizer, scheduler, x, y, 0.5))  # noqa: B023
    found["rate"] = scheduler.get_last_lr()
    found["asked"], found["updates"] = votes.asked, len(updates)
    found["sums"] = max(float(g.abs().max()) for g in step.gradients().values())
    found["buffers"] = [b.clone() for b in model.buffers()]
    return found


def by_hand(
    rank: int, world: int, name: str, ballots: Ballots, *, flushed: bool = False
) -> dict[str, Any]:
    model, optimizer, scheduler = _alike(rank, world, name, {})
    found: dict[str, Any] = {"parameters": []}
    for window, row in enumerate(ballots):
        short = flushed and window == len(ballots) - 1
        calls = K - 1 if short else K
        if world > 1:  # as DDP does at the start of a window
            for buffer in model.buffers():
                dist.broadcast(buffer, 0)
        for number in range(calls):
            x, y = _batch(rank, K * window + number)
            (F.cross_entropy(model(x), y) / (calls * world)).backward()
        for p in model.parameters():
            if world > 1:
                dist.all_reduce(p.grad)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if all(said is True for said in row[:world]):
            optimizer.step()
            scheduler.step()
        optimizer.zero_grad()
        found["parameters"].append([p.detach().clone() for p in model.parameters()])
    found["rate"] = scheduler.get_last_lr()
    return found


def both(
    rank: int, world: int, name: str, ballots: Ballots, more: dict[str, Any], flushed: bool = False
) -> tuple[dict[str, Any], dict[str, Any]]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Looking.step runs as it is")
        found = ours(rank, world, name, ballots, more, flushed=flushed)
    return found, by_hand(rank, world, name, ballots, flushed=flushed)


def flushed_early(rank: int) -> dict[str, Any]:
    """Rank 1's data ends after one call, and its first vote raises while it flushes; rank 0 goes on for two windows."""
    model, optimizer, scheduler = _alike(rank, 2, "AdamW", {})
    asked: list[int] = []

    def commit() -> bool:
        asked.append(1)
        if rank == 1 and len(asked) == 1:
            raise RuntimeError("no disk")
        return True

    step = gradsync_fx.optimize(
        _step, gradient_accumulation_steps=K, commit=commit, backend="aot_eager"
    )
    for number in range(2 * K if rank == 0 else 1):
        step(model, optimizer, scheduler, *_batch(rank, number), 0.5)
    raised = ""
    try:
        step.flush()
    except RuntimeError as failure:
        raised = str(failure)
    return {
        "raised": raised,
        "asked": len(asked),
        "updates": step.optimizer_step,
        "values": list(model.parameters()),
    }


def unlike(rank: int) -> str:
    """Only one rank has a vote."""
    model, optimizer, scheduler = _alike(rank, 2, "AdamW", {})
    commit = (lambda: True) if rank else None
    step = gradsync_fx.optimize(_step, commit=commit, backend="aot_eager")
    try:
        step(model, optimizer, scheduler, *_batch(rank, 0), 0.5)
    except gradsync_fx.RanksDisagreeError as error:
        return str(error)
    return ""


def eagerly(rank: int, world: int, ballots: Ballots) -> tuple[dict[str, Any], dict[str, Any]]:
    """A step that cannot be captured, in the same windows."""
    global _step
    plain = _step

    def branching(*args: Any) -> Any:
        if float(args[3].sum()) > 1e9:  # looks at a value
            return None
        return plain(*args)

    _step = branching
    try:
        return both(rank, world, "AdamW", ballots, {"on_unsupported": "eager"})
    finally:
        _step = plain
