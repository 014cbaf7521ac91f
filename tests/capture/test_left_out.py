"""Helpers that cannot be traced: those that reach what the step is made of are refused with their line, others wait."""

from __future__ import annotations

import functools
import io
import json
import logging
import pickle
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import quick
from tests.models import mlp
from tests.reference import mse, regression
from tests.refusals import refused


class Trainer:
    """What users write: the model, the optimizer, a log, and methods of all kinds."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = mlp()
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05)
        self.file, self.logged = io.StringIO(), list[float]()
        self.limit = 1.0

    def say(self, text: str) -> None:
        """No trace follows a file."""
        self.file.write(text)

    def log(self, name: str, value: Tensor) -> None:
        self.say(json.dumps({name: float(value)}))
        self.logged.append(float(value))

    def project(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                if p.norm() > self.limit:
                    p.mul_(0.5)

    def slower(self) -> None:
        self.optimizer.param_groups[0]["lr"] *= (
            0.5 if "x" in pickle.dumps(self.limit).hex() else 1.0
        )

    def project_by(self, other: Trainer) -> None:
        other.project()

    @property
    def weights(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def of_a_property(self) -> None:
        self.say(str(float(self.weights[0].norm())))


def written(model: nn.Module, where: io.StringIO) -> None:
    where.write(str(len(list(model.parameters()))))


def clipped(parameters: Any, where: io.StringIO) -> None:
    norms = [float(p.grad.norm()) for p in parameters if p.grad is not None]
    where.write(str(np.percentile(norms or [0.0], 10)))


def seeded(call: int) -> None:
    random.seed(call)
    np.random.seed(call)
    torch.manual_seed(call)


def drawn(where: io.StringIO) -> None:
    where.write(pickle.dumps(np.random.rand()).hex())


def differentiated(loss: Tensor, where: io.StringIO) -> None:
    loss.backward()
    where.write(str(float(loss)))


def optimized(optimizer: Optimizer, where: io.StringIO) -> None:
    where.write(str(optimizer.param_groups[0]["lr"]))


PARTIAL = functools.partial(written, mlp())


def around(trainer: Trainer) -> Callable[[], None]:
    """A closure: the model is a name around it."""
    model = trainer.model

    def inside() -> None:
        trainer.file.write(str(float(sum(p.norm() for p in model.parameters()))))

    return inside


Call = Callable[[Trainer, Tensor], object]
REACHING: dict[str, tuple[Call, str]] = {
    "a module": (lambda t, loss: written(t.model, t.file), "a module that is trained"),
    "parameters": (lambda t, loss: clipped(list(t.model.parameters()), t.file), "trained"),
    "a generator of them": (lambda t, loss: clipped(t.model.parameters(), t.file), ""),
    "an optimizer": (lambda t, loss: optimized(t.optimizer, t.file), "a SGD"),
    "a partial": (lambda t, loss: PARTIAL(t.file), "trained"),
    "an attribute": (lambda t, loss: t.project(), "model"),
    "settings of an optimizer": (lambda t, loss: t.slower(), "optimizer"),
    "an object that is given": (lambda t, loss: t.project_by(t), "model"),
    "a property": (lambda t, loss: t.of_a_property(), "model"),
    "seeds": (lambda t, loss: seeded(3), "random generator"),
    "numbers of numpy": (lambda t, loss: drawn(t.file), ""),
    "backward": (lambda t, loss: differentiated(loss, t.file), ""),
    "a freeze": (lambda t, loss: t.model.requires_grad_(False), "model"),
}


def step_of(call: Call, trainer: Trainer) -> Callable[..., Tensor]:
    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(trainer.model, x, y)
        call(trainer, loss)
        loss.backward()
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("name", REACHING)
def test_a_helper_that_reaches_what_the_step_is_made_of(name: str) -> None:
    call, why = REACHING[name]
    trainer = Trainer()
    before = [p.clone() for p in trainer.model.parameters()]
    batch = regression(1, 1)[0][0]
    step = quick(step_of(call, trainer), 2)
    error = refused(gradsync_fx.CaptureError, "test_left_out.py:", step, *batch)
    assert why in error.seen, error.seen
    assert 'on_unsupported="eager"' in error.fix
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert trainer.file.getvalue() == ""
    assert step.micro_step == 0


def test_a_closure_whose_name_is_the_model() -> None:
    trainer = Trainer()
    inside = around(trainer)
    step = quick(step_of(lambda t, loss: inside(), trainer), 2)
    error = refused(gradsync_fx.CaptureError, "test_left_out.py:", step, *regression(1, 1)[0][0])
    assert "'model'" in error.seen


def test_a_trainer_that_holds_the_model_may_log() -> None:
    """Its loss is a number of the program, and each call says its own."""
    trainer = Trainer()
    step = quick(step_of(lambda t, loss: t.log("loss", loss), trainer), 2)
    windows = regression(3, 2)
    losses = [float(step(*batch)) for window in windows for batch in window]
    assert trainer.logged == losses
    assert step.optimizer_step == 3
    assert step.compile_count == 2
    (moved,) = step.report().moved
    assert "<lambda> at " in moved


class Parts(nn.Module):
    """A module that trains itself, and logs."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.lines = mlp(), io.StringIO()

    def log(self, name: str, value: Tensor) -> None:
        self.lines.write(json.dumps({name: float(value)}))

    def norm(self) -> None:
        self.lines.write(str(float(sum(p.norm() for p in self.parameters()))))


@pytest.mark.parametrize("norm", [False, True])
def test_a_module_that_logs(norm: bool) -> None:
    torch.manual_seed(0)
    parts = Parts()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.05)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(parts.net, x, y)
        if norm:
            parts.norm()
        else:
            parts.log("loss", loss)
        loss.backward()
        optimizer.step()
        return loss

    run = quick(step, 2)
    if norm:
        refused(gradsync_fx.CaptureError, "Parts.norm", run, *regression(1, 1)[0][0])
        return
    losses = [float(run(*batch)) for batch in regression(1, 2)[0]]
    assert parts.lines.getvalue() == "".join(json.dumps({"loss": v}) for v in losses)


def test_a_logger_that_the_step_looks_up(caplog: pytest.LogCaptureFixture) -> None:
    trainer = Trainer()

    def look_up(t: Trainer, loss: Tensor) -> None:
        found = logging.getLogger("tests.looked_up")
        if found.isEnabledFor(logging.INFO):
            found.info("loss %.4f", loss)
        logging.getLogger("tests.looked_up").debug("unseen")

    step = quick(step_of(look_up, trainer), 2)
    with caplog.at_level(logging.INFO, logger="tests.looked_up"):
        losses = [float(step(*batch)) for batch in regression(1, 2)[0]]
    mine = [r.getMessage() for r in caplog.records if r.name == "tests.looked_up"]
    assert mine == [f"loss {v:.4f}" for v in losses]


def test_what_reaches_the_model_runs_in_an_eager_step() -> None:
    """The way out that the error prints."""
    trainer = Trainer()
    step = quick(step_of(lambda t, loss: t.log("loss", loss.detach()), trainer), 2)
    step(*regression(1, 1)[0][0])
    call, _ = REACHING["a module"]
    step = quick(step_of(call, trainer), 2, on_unsupported="eager")
    with pytest.warns(gradsync_fx.GradSyncWarning, match="test_left_out.py:"):
        step(*regression(1, 1)[0][0])
    assert trainer.file.getvalue().endswith("}4")
