"""Plays a case with gradsync_fx, on one rank in this process or as one of two."""

from __future__ import annotations

import io
import warnings
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.eagerly import eagerly
from tests.fuzz.cases import Case, Do, batch_of, model_of, scheduler_of, step_of
from tests.optimizers import OPTIMIZERS


@dataclass
class Trace:
    """What a run showed on one rank: losses, the model after each update and in the end, the optimizer's state."""

    losses: list[float] = field(default_factory=list)
    updates: list[dict[str, Tensor]] = field(default_factory=list)
    end: dict[str, Tensor] = field(default_factory=dict)


class Player:
    """The objects of one run; a reload makes them anew."""

    def __init__(self, case: Case, rank: int) -> None:
        self.case, self.rank, self.trace = case, rank, Trace()
        self.make(case.k)

    def make(self, k: int) -> None:
        self.model = self.wrapped = model_of(self.case)
        if self.case.wrap == "ddp":
            self.wrapped = DistributedDataParallel(self.model)
        self.optimizer = OPTIMIZERS[self.case.optimizer](self.model.parameters())
        self.scheduler = scheduler_of(self.case, self.optimizer)
        options = {**self.case.options, "gradient_accumulation_steps": k}
        self.step = gradsync_fx.optimize(step_of(self.case), **options)
        self.k = k

    def do(self, do: Do) -> None:
        if do.what == "call" and do.runs[self.rank]:
            x, y = batch_of(self.case, do, self.rank)
            branch = do.branch
            loss = self.step(self.wrapped, self.optimizer, self.scheduler, x, y, branch)
            self.trace.losses.append(float(loss))
        elif do.what == "call":
            self.step.skip()
        elif do.what == "flush":
            before = self.step.optimizer_step
            self.step.flush()
            assert self.step.pending == 0
            if self.step.optimizer_step == before:
                return
        elif do.what == "discard":
            self.step.discard()
            return
        elif do.what == "steps":
            if not self.step.pending:
                self.step.set_gradient_accumulation_steps(do.k)
                self.k = do.k
            return
        elif do.what == "reload":
            self.reload()
            return
        if self.step.sync_gradients:
            self.trace.updates.append(snapshot(self.model))

    def reload(self) -> None:
        """Everything through a file, into new objects."""
        numbers, file = torch.get_rng_state(), io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler else {},
            "window": self.step.state_dict(),
        }
        torch.save(state, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        self.make(self.k)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        if self.scheduler:
            self.scheduler.load_state_dict(saved["scheduler"])
        self.step.load_state_dict(saved["window"])
        torch.set_rng_state(numbers)


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Tensor]:
    """The model's tensors and the optimizer's state, by name."""
    found = snapshot(model)
    for name, p in model.named_parameters():
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor | int | float):
                found[f"{name}:{key}"] = torch.as_tensor(value).detach().clone().double()
    for group in optimizer.param_groups:
        found["lr"] = torch.as_tensor(group["lr"]).detach().clone().double()
    return found


def play(rank: int, case: Case) -> Trace:
    """What this rank does and sees."""
    with eagerly() if case.way == "eager" else nullcontext(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        player = Player(case, rank)
        torch.manual_seed(1)
        for do in case.script:
            player.do(do)
        player.step.discard()
        player.trace.end = state_of(player.model, player.optimizer)
    return player.trace
