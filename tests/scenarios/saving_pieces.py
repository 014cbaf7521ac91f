"""Pieces of an optimizer's state on their way to files: beside training that goes on, and of a rank that is killed."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

import gradsync_fx
from tests.drive import plain_step, quick
from tests.scenarios.disagreement import refusal
from tests.scenarios.sharded import batches, equal, held, made, net


class Run:
    """A model that is trained with updates that are divided."""

    def __init__(self, rank: int, name: str = "AdamW", **options: Any) -> None:
        self.rank, self.world = rank, dist.get_world_size()
        self.model = net(bias=name != "Muon")
        self.optimizer = made(name, self.model)
        self.step = quick(plain_step, 1, shard_optimizer=True, **options)
        self.x, self.y = batches(40)

    def train(self, first: int, last: int) -> None:
        for i in range(first, last):
            self.step(self.model, self.optimizer, *self.batch(i))

    def batch(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[self.world * i + self.rank], self.y[self.world * i + self.rank]

    def parts(self) -> dict[str, Any]:
        shards = gradsync_fx.OptimizerShards(self.optimizer)
        return {"model": self.model.state_dict(), "optimizer": shards}

    def load(self, folder: str) -> None:
        self.step.prepare(self.model, self.optimizer, *self.batch(0))
        parts = self.parts()
        dcp.load(parts, checkpoint_id=folder)
        self.model.load_state_dict(parts["model"])


def beside_training(rank: int, name: str, folder: str) -> dict[str, bool]:
    """`async_save` after three windows, three more while it writes; then those again, from what was saved."""
    run, group = Run(rank, name), dist.new_group(backend="gloo")
    run.train(0, 3)
    wanted = copy.deepcopy(run.optimizer.state_dict())
    writing = dcp.async_save(run.parts(), checkpoint_id=folder, process_group=group)
    run.train(3, 6)
    writing.result()
    again = Run(rank, name)
    again.load(folder)
    loaded = equal(again.optimizer.state_dict()["state"], wanted["state"])
    again.train(3, 6)
    same = equal(held(again.model), held(run.model))
    return {"loaded": loaded, "trained on": same}


class Dying(dcp.FileSystemWriter):
    """Kills its process with its file half written."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        if dist.get_rank() == 1:
            Path(self.path, "__1_0.distcp").write_bytes(b"half of it")
            os.kill(os.getpid(), signal.SIGKILL)
        return super().write_data(plan, planner)


def killed(rank: int, folder: str, when: str) -> dict[str, Any]:
    """A whole checkpoint; then one of which rank 1 is killed, before it meets the others or while it writes.

    Told by a file of each rank, as the killed one answers nobody: what the save raised, and what the call after it.
    """
    run = Run(rank, rank_timeout=3.0)
    run.train(0, 3)
    dcp.save(run.parts(), checkpoint_id=f"{folder}/first")
    run.train(3, 5)
    begun = time.monotonic()
    if when == "before" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found: dict[str, Any] = {"save": "nothing"}
    try:
        dcp.save(run.parts(), storage_writer=Dying(f"{folder}/second"))
    except gradsync_fx.RankLostError as lost:
        found["save"] = str(lost)
    except RuntimeError as failure:  # gloo's own, inside of torch's checkpoint
        found["save"] = type(failure).__name__
    found["next"] = refusal(run.optimizer.state_dict)
    found["seconds"] = time.monotonic() - begun
    torch.save(found, f"{folder}/rank{rank}.pt")
    os._exit(0)


def resumed(rank: int, folder: str) -> dict[str, Any]:
    """From the first checkpoint; beside what three windows give. And what comes of loading the second."""
    run, straight = Run(rank), Run(rank)
    straight.train(0, 3)
    run.load(f"{folder}/first")
    same = equal(run.optimizer.state_dict()["state"], straight.optimizer.state_dict()["state"])
    parameters = equal(held(run.model), held(straight.model))
    half = "nothing"
    try:
        run.load(f"{folder}/second")
    except dcp.CheckpointException as failure:  # no Exception
        half = type(failure).__name__
    unchanged = equal(run.optimizer.state_dict(), straight.optimizer.state_dict())
    return {"same": same and parameters, "half": half, "unchanged": unchanged}
