"""Writes past autograd, and writes of parameters in forward: what plain eager accumulation makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import mse
from tests.refusals import refused


Step = Callable[[nn.Module, nn.Module, Any, Tensor, Tensor], Tensor]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def clipped(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_step(model, optimizer, x, y)
    for p in model.parameters():
        p.data.clamp_(-0.05, 0.05)
    return loss


def clipped_ahead(
    model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor
) -> Tensor:
    for p in model.parameters():
        p.detach().clamp_(-0.05, 0.05)
    return plain_step(model, optimizer, x, y)


def averaged(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_step(model, optimizer, x, y)
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return loss


def copied(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_step(model, optimizer, x, y)
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data.copy_(0.1 * fast.data + 0.9 * slow.detach())
    return loss


def assigned(model: nn.Module, average: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_step(model, optimizer, x, y)
    for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
        slow.data = 0.1 * fast.data + 0.9 * slow.data
    return loss


def eagerly(
    step: Step, model: nn.Module, average: nn.Module, optimizer: Any, data: Any, k: int
) -> None:
    """One update a window, of all its rows at once: what a step of one micro-step does."""
    for n in range(0, len(data), k):
        x, y = (torch.cat(part) for part in zip(*data[n : n + k], strict=True))
        step(model, average, optimizer, x, y)


@pytest.mark.captured
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [clipped, clipped_ahead, averaged, copied, assigned])
def test_writes_through_data(step: Step, backend: str) -> None:
    """Once per update what depends on it, and the update itself where it was."""
    model = mlp()
    average, twin, slow = (copy.deepcopy(model) for _ in range(3))
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend=backend)
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(6)]
    for x, y in data:
        run(model, average, mine, x, y)
    eagerly(step, twin, slow, theirs, data, 2)
    for one, other in ((model, twin), (average, slow)):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


class Normed(nn.Module):
    """A bias that the first forward sets from its data."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.head, self.ready = nn.Parameter(torch.zeros(8)), nn.Linear(8, 1), False

    def forward(self, x: Tensor) -> Tensor:
        if not self.ready:
            with torch.no_grad():
                self.bias.copy_(-x.mean(0))
            self.ready = True
        return self.head(x + self.bias)


class Codebook(nn.Module):
    """A parameter that follows the data, and that the optimizer decays as well."""

    def __init__(self, data: bool) -> None:
        super().__init__()
        self.encoder, self.code, self.head = (
            nn.Linear(8, 4),
            nn.Parameter(torch.zeros(4)),
            nn.Linear(4, 1),
        )
        self.data = data

    def forward(self, x: Tensor) -> Tensor:
        z = self.encoder(x)
        if self.data:
            self.code.data.lerp_(z.detach().mean(0), 0.5)
        else:
            with torch.no_grad():
                self.code.lerp_(z.mean(0), 0.5)
        return self.head(z - self.code)


@pytest.mark.captured
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rest", [0, 1])
@pytest.mark.parametrize("make", [Normed, lambda: Codebook(False), lambda: Codebook(True)])
def test_parameters_that_forward_writes(
    make: Callable[[], nn.Module], rest: int, backend: str
) -> None:
    """On every call; the update adds to what is there. rest: micro-steps of a last window, which is flushed."""
    model = make()
    twin = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, weight_decay=0.01) for m in (model, twin))
    run = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, backend=backend)
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(4 + rest)]
    for x, y in data:
        run(model, mine, x, y)
    run.flush()
    for n in range(0, len(data), 2):
        window = data[n : n + 2]
        for x, y in window:
            (mse(twin, x, y) / len(window)).backward()
        theirs.step()
        theirs.zero_grad()
    for (name, p), q in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0, msg=f"{name}: {{}}".format)


@pytest.mark.captured
@pytest.mark.parametrize("other", [lambda x: x, lambda x: x[:2] + 1])
def test_other_memory_is_refused(other: Callable[[Tensor], Tensor]) -> None:
    """What it would share with another tensor, or that has another form."""

    def step(model: nn.Module, optimizer: Any, held: Tensor, x: Tensor, y: Tensor) -> Tensor:
        loss = plain_step(model, optimizer, x, y)
        held.data = other(x)
        return loss

    model, held = mlp(), torch.zeros(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    run = quick(step, 2)
    batch = torch.randn(4, 8), torch.randn(4, 1)
    error = refused(gradsync_fx.CaptureError, "args.2", lambda: run(model, optimizer, held, *batch))
    assert "copy_" in error.fix
