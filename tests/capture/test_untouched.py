"""Helpers after the program are watched: what they may not touch, they do not get to touch."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import quick
from tests.models import mlp
from tests.reference import mse, regression
from tests.refusals import refused


class Hidden:
    """A trainer whose methods reach the model by a name that no code spells out."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parts: dict[str, Any] = {}
        self.file, self.x = io.StringIO(), torch.ones(1)

    def get(self, name: str) -> Any:
        self.file.write(name)
        return vars(self)["".join(("par", "ts"))][name]

    def write(self) -> None:
        with torch.no_grad():
            self.get("model")[0].weight.mul_(0.5)

    def write_data(self) -> None:
        self.get("model")[0].weight.data.mul_(0.5)

    def read(self) -> None:
        self.file.write(str(float(self.get("model")[0].weight.norm())))

    def gradients(self) -> None:
        self.file.write(str([p.grad is None for p in self.get("model").parameters()]))

    def buffer(self) -> None:
        self.get("model").scale.add_(1)

    def state(self) -> None:
        for held in self.get("optimizer").state.values():
            held["momentum_buffer"].zero_()

    def setting(self) -> None:
        self.get("optimizer").param_groups[0]["lr"] = 3.0

    def step(self) -> None:
        self.get("optimizer").step()

    def freeze(self) -> None:
        self.get("model").requires_grad_(False)

    def sow(self) -> None:
        getattr(self.get("generator"), "_".join(("manual", "deseed"[2:])))(5)

    def input(self) -> None:
        self.file.write("input")
        self.x.zero_()

    def swallow(self) -> None:
        try:
            self.write()
        except Exception:
            self.file.write("nothing happened")

    def form(self) -> None:
        self.file.write(str(sum(p.numel() for p in self.get("model").parameters())))


TOUCHING = [
    "write", "write_data", "read", "gradients", "buffer", "state", "setting", "step", "freeze", "sow", "input",
    "swallow",
]  # fmt: skip


def made(name: str, k: int = 2, **options: Any) -> tuple[Hidden, gradsync_fx.OptimizedStep]:
    hidden, model = Hidden(), mlp()
    model.register_buffer("scale", torch.ones(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hidden.parts = {"generator": torch.default_generator}
    say = getattr(hidden, name)

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y) * model.scale
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        say()
        return loss

    hidden.parts |= {"model": model, "optimizer": optimizer}
    return hidden, quick(step, k, **options)


@pytest.mark.parametrize("name", TOUCHING)
def test_it_is_stopped_and_the_window_goes_on(name: str) -> None:
    """Nothing is touched; and without the helper, the window is that of a step that never had it."""
    hidden, step = made(name)
    model, optimizer = hidden.parts["model"], hidden.parts["optimizer"]
    windows = regression(2, 2)
    if name == "state":  # there is none before the first update
        hidden.parts["optimizer"] = torch.optim.SGD(mlp().parameters())
        for batch in windows[0]:
            step(model, optimizer, *batch)
        hidden.parts["optimizer"] = optimizer
    x, y = windows[1][0]
    hidden.x, given = x, x.clone()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    generator, calls = torch.get_rng_state(), step.micro_step
    error = refused(
        gradsync_fx.LeftOutError, f"Hidden.{name} at {__file__}:", step, model, optimizer, x, y
    )
    assert "after the program" in error.seen
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert torch.equal(generator, torch.get_rng_state())
    assert torch.equal(x, given)
    assert optimizer.param_groups[0]["lr"] == 0.05
    assert (step.micro_step, step.pending) == (calls + 1, 1)
    step.flush()
    assert step.pending == 0


def test_the_form_of_a_parameter_may_be_asked_for() -> None:
    hidden, step = made("form")
    for batch in regression(1, 2)[0]:
        step(hidden.parts["model"], hidden.parts["optimizer"], *batch)
    assert hidden.file.getvalue() == "model161model161"
    assert step.optimizer_step == 1
