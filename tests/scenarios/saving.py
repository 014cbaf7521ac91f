"""Stops at every position of a window, and goes on in other processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step
from tests.reference import regression


K, CALLS = 3, 7


class Run:
    """A model with dropout and batch statistics, its optimizer, scheduler and step."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1)
        )
        self.model = DistributedDataParallel(net)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.9)
        self.step = gradsync_fx.optimize(
            _step_of(options), gradient_accumulation_steps=K, **options
        )

    def call(self, batch: tuple[Tensor, ...]) -> None:
        self.step(self.model, self.optimizer, *batch)
        if self.step.sync_gradients:
            self.scheduler.step()

    def tensors(self) -> dict[str, Tensor]:
        found = {name: t.clone() for name, t in self.model.module.state_dict().items()}
        for i, state in self.optimizer.state_dict()["state"].items():
            found.update({f"{i}.{key}": torch.as_tensor(v).clone() for key, v in state.items()})
        found["lr"] = torch.tensor(self.scheduler.get_last_lr()[0])
        found["count"] = torch.tensor([self.step.micro_step, self.step.optimizer_step])
        return found


def _step_of(options: dict[str, Any]) -> Any:
    if options.get("reduction") != "weighted":
        return plain_step

    def weighed(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        gradsync_fx.micro_batch_weight(x.abs().sum())
        return plain_step(model, optimizer, x, y)

    return weighed


def _data(rank: int) -> list[tuple[Tensor, ...]]:
    return regression(1, CALLS, seed=30 + rank)[0]


def through_files(rank: int, folder: str, options: dict[str, Any], stop: int | None) -> Any:
    """stop None: runs through, saving before each call. Else: loads what was saved before call `stop`."""
    run = Run(options)
    start = 0
    if stop is not None:
        saved = torch.load(Path(folder) / f"{stop}.{rank}", weights_only=True)
        run.model.load_state_dict(saved["model"])
        run.optimizer.load_state_dict(saved["optimizer"])
        run.scheduler.load_state_dict(saved["scheduler"])
        run.step.load_state_dict(saved["step"])
        torch.set_rng_state(saved["random"])
        start = stop
    for i, batch in enumerate(_data(rank)):
        if i < start:
            continue
        if stop is None:
            torch.save(
                {
                    "model": run.model.state_dict(),
                    "optimizer": run.optimizer.state_dict(),
                    "scheduler": run.scheduler.state_dict(),
                    "step": run.step.state_dict(),
                    "random": torch.get_rng_state(),
                },
                Path(folder) / f"{i}.{rank}",
            )
        run.call(batch)
    return run.tensors()


def through_dcp(rank: int, folder: str, options: dict[str, Any], stop: int | None) -> Any:
    """The same by `torch.distributed.checkpoint`: both ranks write one checkpoint."""
    run = Run(options)
    data = _data(rank)
    random = torch.get_rng_state()
    run.step.prepare(run.model, run.optimizer, *data[0])
    assert torch.equal(torch.get_rng_state(), random)

    def state() -> dict[str, Any]:
        return {
            "model": get_model_state_dict(run.model),
            "optimizer": get_optimizer_state_dict(run.model, run.optimizer),
            "scheduler": run.scheduler.state_dict(),
            "step": run.step.state_dict(),
            f"random{rank}": torch.get_rng_state(),
        }

    start = 0
    if stop is not None:
        loaded = state()
        dcp.load(loaded, checkpoint_id=Path(folder) / str(stop))
        run.model.load_state_dict(loaded["model"], strict=False)
        run.model.module.load_state_dict(loaded["model"])
        set_optimizer_state_dict(run.model, run.optimizer, loaded["optimizer"])
        run.scheduler.load_state_dict(loaded["scheduler"])
        run.step.load_state_dict(loaded["step"])
        torch.set_rng_state(loaded[f"random{rank}"])
        start = stop
    for i, batch in enumerate(data):
        if i < start:
            continue
        if stop is None:
            dcp.save(state(), checkpoint_id=Path(folder) / str(i))
        run.call(batch)
    return run.tensors()


HOW = {"files": through_files, "dcp": through_dcp}


def save_and_resume(
    rank: int, how: str, folder: str, options: dict[str, Any], stops: list[int | None]
) -> list[dict[str, Tensor]]:
    return [HOW[how](rank, folder, options, stop) for stop in stops]
