"""A window that is saved in its middle, and goes on with another number of ranks; beside it in plain eager PyTorch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.models import mlp
from tests.reference import mse


K, BEFORE = 4, 6  # calls of the run that is saved: a window, and half of another


def train_step(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, weight: float
) -> Tensor:
    gradsync_fx.micro_batch_weight(weight)
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(number: int, rank: int) -> tuple[Tensor, Tensor, float]:
    source = torch.Generator().manual_seed(100 * number + rank)
    x, y = torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source)
    return x, y, 1.0 + rank


def made(options: dict[str, Any]) -> tuple[nn.Module, Optimizer, Any]:
    torch.manual_seed(0)
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    warnings.filterwarnings("ignore", "micro_batch_weight has no effect")
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=K, backend="aot_eager", **options
    )
    return model, optimizer, step


def saved(rank: int, folder: str, options: dict[str, Any]) -> None:
    model, optimizer, step = made(options)
    for number in range(BEFORE):
        step(model, optimizer, *batch(number, rank))
    states = {"model": model, "optimizer": optimizer}
    step.save(f"{folder}/rank{rank}.pt", **{n: s.state_dict() for n, s in states.items()})
    dcp.save({**states_of(states), "step": step}, checkpoint_id=f"{folder}/dcp")


def mixed(rank: int, folder: str) -> str:
    """What is said of one rank's file beside a later one of the other."""
    model, optimizer, step = made({})
    for number in range(2 * K):
        step(model, optimizer, *batch(number, rank))
        if number in (K - 1, 2 * K - 1):
            step.save(f"{folder}/rank{rank}-{step.optimizer_step}.pt")
    dist.barrier()
    try:
        step.load([f"{folder}/rank0-1.pt", f"{folder}/rank1-2.pt"])
    except gradsync_fx.StateError as error:
        return str(error)
    return ""


def states_of(states: dict[str, Any]) -> dict[str, Any]:
    return {name: one.state_dict() for name, one in states.items()}


def resumed(rank: int, folder: str, how: str, options: dict[str, Any]) -> dict[str, Any]:
    """Loads, and goes on to the end of the next window."""
    model, optimizer, step = made(options)
    step.prepare(model, optimizer, *batch(0, rank))
    try:
        if how == "files":
            files = sorted(Path(folder).glob("rank*.pt"))
            states = step.load(files)
        elif how == "own file":
            states = step.load(f"{folder}/rank{rank}.pt")
        else:
            first = torch.load(f"{folder}/rank0.pt", weights_only=True)["states"]
            states = {name: first[name] for name in ("model", "optimizer")}
            planner = gradsync_fx.WindowLoadPlanner() if how == "planner" else None
            dcp.load({"step": step}, checkpoint_id=f"{folder}/dcp", planner=planner)
    except (gradsync_fx.StateError, dcp.CheckpointException) as error:
        return {"error": str(error)}
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    at = (step.micro_step, step.pending)
    for number in range(BEFORE, 3 * K):
        step(model, optimizer, *batch(number, rank))
    return {"at": at, "updates": step.optimizer_step, "values": _values(model)}


def by_hand(old: int, new: int, weighted: bool) -> list[Tensor]:
    """One process that has the data of all ranks: as many as there are at each call."""
    model, optimizer, _ = made({})
    total = 0.0
    for number in range(3 * K):
        for rank in range(old if number < BEFORE else new):
            x, y, weight = batch(number, rank)
            weight = weight if weighted else 1.0
            (mse(model, x, y) * weight).backward()
            total += weight
        if number % K == K - 1:
            for p in model.parameters():
                p.grad /= total
            optimizer.step()
            optimizer.zero_grad()
            total = 0.0
    return _values(model)


def _values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def loaded_again(rank: int, folder: str, workers: int, beside: bool = False) -> dict[str, Any]:
    """A torchdata loader beside the window, both saved with DCP inside of a window: bitwise the undisturbed run.

    beside: the run that saves goes on while DCP writes.
    """
    from torchdata.stateful_dataloader import StatefulDataLoader

    warnings.filterwarnings("ignore", "'set_vital' is deprecated")
    data = [batch(number, rank) for number in range(3 * K)]
    group = dist.new_group(backend="gloo") if beside else None

    def run(stop: int | None) -> tuple[list[Tensor], list[float]]:
        model, optimizer, step = made({})
        loader = StatefulDataLoader(data, batch_size=None, num_workers=workers)
        losses, writing = [], None
        for number, (x, y, weight) in enumerate(loader, 1):
            losses.append(float(step(model, optimizer, x, y, float(weight))))
            if number == stop:
                held = {"model": model, "optimizer": optimizer, "step": step}
                point = {n: one.state_dict() for n, one in held.items()}
                point[f"loader{rank}"] = loader.state_dict()
                if not beside:
                    dcp.save(point, checkpoint_id=folder)
                    break
                writing = dcp.async_save(point, checkpoint_id=folder, process_group=group)
        if writing is not None:
            writing.result()
            del losses[stop:]
        if stop is None:
            return _values(model), losses
        model, optimizer, step = made({})
        loader = StatefulDataLoader(data, batch_size=None, num_workers=workers)
        step.prepare(model, optimizer, *batch(0, rank))
        _make_room(optimizer)
        held = {"model": model, "optimizer": optimizer, "step": step, f"loader{rank}": loader}
        dcp.load(held, checkpoint_id=folder)
        for x, y, weight in loader:
            losses.append(float(step(model, optimizer, x, y, float(weight))))
        return _values(model), losses

    whole, losses = run(None)
    broken, found = run(BEFORE)
    return {"same": all(map(torch.equal, whole, broken)), "losses": (losses, found)}


def _make_room(optimizer: Optimizer) -> None:
    """DCP loads into a state that is there."""
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.zeros_like(p)
    lr, optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"], 0.0
    optimizer.step()
    optimizer.param_groups[0]["lr"] = lr
    optimizer.zero_grad()
