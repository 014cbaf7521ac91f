"""Steps with collectives of their own: metrics for one rank, gathered features, activations reduced in place."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.models import mlp
from tests.optimizers import sgd
from tests.scenarios.common import data_of
from tests.scenarios.disagreement import refusal


Act = Callable[[int, nn.Module, Tensor, Tensor], Tensor | None]


def _world() -> Any:
    return dist.group.WORLD


def averaged_loss(rank: int, model: nn.Module, out: Tensor, loss: Tensor) -> Tensor | None:
    """The metric of rank 0."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total / 2 if rank == 0 else None


def largest(rank: int, model: nn.Module, out: Tensor, loss: Tensor) -> Tensor | None:
    """Two collectives of different kinds, of which each rank uses one."""
    top = out.detach().amax()
    dist.all_reduce(top, dist.ReduceOp.MAX)
    count = torch.ones(())
    dist.all_reduce(count)
    return top if rank == 0 else count


def gathered(rank: int, model: nn.Module, out: Tensor, loss: Tensor) -> Tensor | None:
    seen = funcol.all_gather_tensor(out.detach(), 0, _world())
    return seen.sum() if rank == 1 else None


def gathered_in_place(rank: int, model: nn.Module, out: Tensor, loss: Tensor) -> Tensor | None:
    seen = torch.zeros(2 * out.shape[0], *out.shape[1:])
    dist.all_gather_into_tensor(seen, out.detach().contiguous())
    return seen.sum() if rank == 0 else None


def gathered_numbers(rank: int, model: nn.Module, out: Tensor, loss: Tensor) -> Tensor | None:
    """Without dimensions."""
    seen = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(seen, loss.detach())
    return torch.stack(seen).sum() if rank == 0 else None


def thrown_away(rank: int, model: nn.Module, out: Tensor, loss: Tensor) -> Tensor | None:
    """Nobody uses it."""
    funcol.reduce_scatter_tensor(out.detach(), "sum", 0, _world())
    return None


METRICS: dict[str, Act] = {
    f.__name__: f
    for f in (averaged_loss, largest, gathered, gathered_in_place, gathered_numbers, thrown_away)
}


class Reduced(nn.Module):
    """An activation is reduced in place, or gathered, between two layers; autograd does not see it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        if self.how in ("saved", "copied"):
            x = torch.tanh(x)  # its backward reads what it gave
        if self.how == "gather":
            parts = [torch.empty_like(x, requires_grad=False) for _ in range(2)]
            dist.all_gather(parts, x)
            x = x + parts[0] * parts[1]
        elif self.how == "function":
            x = funcol.all_reduce(x, "sum", _world())
        elif self.how == "max":
            dist.all_reduce(x, dist.ReduceOp.MAX)
        else:
            x = x.clone() if self.how == "copied" else x
            dist.all_reduce(x)
        return self.outer(x)


def both_ways(
    rank: int, what: str, k: int, wrap: str = "ddp", options: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Two windows and one call more, flushed, beside the eager loop with the same collectives."""
    model = Reduced(what.partition(" ")[2]) if what.startswith("reduced") else mlp()
    other = copy.deepcopy(model)
    act = METRICS.get(what)
    said: dict[str, list[Tensor]] = {"ours": [], "eager": []}

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        value = act(rank, model, out, loss) if act is not None else None
        return loss if value is None else (loss, value)

    ours = DistributedDataParallel(model) if wrap == "ddp" else model
    run = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=k, **{"backend": "aot_eager", **(options or {})}
    )
    mine, theirs = sgd(ours), sgd(other)
    data = [b for window in data_of(rank, 2, k) for b in window] + data_of(rank, 3, 1)[2]
    for batch in data:
        said["ours"].append(_flat(run(ours, mine, *batch)))
    run.flush()
    eager = DistributedDataParallel(other)
    warnings.filterwarnings("ignore", "c10d::.*: an autograd kernel was not registered")
    for start in range(0, len(data), k):
        window = data[start : start + k]
        for i, (x, y) in enumerate(window):
            with eager.no_sync() if i + 1 < len(window) else nullcontext():
                out = eager(x)
                loss = nn.functional.mse_loss(out, y)
                (loss / len(window)).backward()
            value = act(rank, eager, out, loss) if act is not None else None
            said["eager"].append(_flat(loss.detach() if value is None else (loss.detach(), value)))
        theirs.step()
        theirs.zero_grad()
    return {
        "said": said,
        "ours": [p.detach() for p in model.parameters()],
        "eager": [p.detach() for p in other.parameters()],
        "nodes": [str(n.target) for n in run.programs["boundary"].graph.nodes],
    }


def saved(rank: int) -> dict[str, Any]:
    """What is reduced in place was kept for the backward: eager PyTorch takes the reduced value there, unnoticed."""
    model = DistributedDataParallel(Reduced("saved"))

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = gradsync_fx.optimize(train_step, backend="aot_eager")
    batch = data_of(rank, 1, 1)[0][0]
    return refusal(lambda: run(model, sgd(model), *batch))


def _flat(result: Any) -> Tensor:
    values = result if isinstance(result, tuple) else (result,)
    return torch.stack([v.reshape(()).clone() for v in values])


def of_gradients(rank: int, k: int, backend: str) -> dict[str, Any]:
    """A norm of the gradients, averaged over the ranks for rank 1's eyes: once per update, in the tail too."""
    model = mlp()

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        total = norm.clone()
        dist.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        return (loss, total / 2, norm) if rank == 1 else (loss, norm, norm)

    run = gradsync_fx.optimize(train_step, gradient_accumulation_steps=k, backend=backend)
    optimizer = sgd(model)
    values = []
    for batch in data_of(rank, 2, k)[0] + data_of(rank, 2, k)[1]:
        values.append(run(model, optimizer, *batch)[1:])
        if k > 1 and not run.sync_gradients:
            assert all(v.isnan() for v in values.pop())
    run(model, optimizer, *data_of(rank, 1, 1)[0][0])
    run.flush()
    return {
        "values": values,
        "weights": [p.detach() for p in model.parameters()],
        "tail": [
            str(n.target) for n in run.programs.get("tail", run.programs["boundary"]).graph.nodes
        ],
    }


def differing(rank: int, how: str, k: int, backend: str = "aot_eager") -> dict[str, Any]:
    """Ranks whose steps hold different collectives."""
    model = mlp()

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        total = loss.detach().clone()
        size = torch.ones(3 + rank if how == "size" else 3)
        if how == "only rank 0":
            if rank == 0:
                dist.all_reduce(total)
        elif how == "kind":
            dist.all_reduce(total, dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
        elif how == "order":
            dist.all_reduce(size if rank else total)
            dist.all_reduce(total if rank else size)
        elif how == "dtype":
            dist.all_reduce(total.double() if rank else total)
        elif how == "size":
            dist.all_reduce(size)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = gradsync_fx.optimize(train_step, gradient_accumulation_steps=k, backend=backend)
    optimizer = sgd(model)
    before = [p.clone() for p in model.parameters()]

    def calls() -> None:
        for batch in data_of(rank, 2, k)[0]:
            run(model, optimizer, *batch)

    said = refusal(calls)
    pairs = zip(before, model.parameters(), strict=True)
    return {**said, "moved": any(not torch.equal(a, b) for a, b in pairs)}


def own_groups(rank: int, k: int) -> dict[str, Any]:
    """Each rank reduces in a group of its own, of another name: no disagreement."""
    groups = [dist.new_group([r]) for r in range(2)]
    model = mlp()

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total, group=groups[rank])
        optimizer.step()
        optimizer.zero_grad()
        return total

    run = gradsync_fx.optimize(train_step, gradient_accumulation_steps=k, backend="aot_eager")
    optimizer = sgd(model)
    for window in data_of(rank, 2, k):
        for batch in window:
            run(model, optimizer, *batch)
    return {"weights": [p.detach() for p in model.parameters()]}


def without_data(rank: int, end: str, k: int, eagerly: bool = False) -> dict[str, Any]:
    """Rank 1's data ends after one window; rank 0 goes on with a step that holds a collective."""
    model = mlp()

    def train_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = nn.functional.mse_loss(out, y)
        loss.backward()
        if not eagerly or loss.item() > -1:
            averaged_loss(rank, model, out, loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=k, backend="aot_eager",
        on_unsupported="eager" if eagerly else "error", rank_timeout=60.0,
    )  # fmt: skip
    optimizer = sgd(model)

    def calls() -> None:
        for window in data_of(rank, 2 - rank, k):
            for batch in window:
                run(model, optimizer, *batch)
        if end == "skip" and rank == 1:
            for _ in range(k):
                run.skip()
        run.flush()

    return refusal(calls)
