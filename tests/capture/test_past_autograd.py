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
    error = refused(
        gradsync_fx.CaptureError, "held in the step", lambda: run(model, optimizer, held, *batch)
    )
    assert "copy_" in error.fix


class Counted:
    """An average of the weights whose decay is made of a count, kept as a tensor: in a module, or beside it."""

    def __init__(self, model: nn.Module, buffer: bool) -> None:
        self.slow = copy.deepcopy(model)
        self.module = nn.Module()
        if buffer:
            self.module.register_buffer("count", torch.zeros(()))
        else:
            self.module.count = torch.zeros(())

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.module.count += 1
        decay = 1 - 1 / (1 + self.module.count)  # type: ignore[operator]
        for slow, p in zip(self.slow.parameters(), model.parameters(), strict=True):
            slow.lerp_(p, 1 - decay)


@pytest.mark.captured
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("buffer", [True, False])
def test_the_count_of_an_average_goes_up_with_updates(buffer: bool, backend: str) -> None:
    def step(model: nn.Module, average: Counted, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = plain_step(model, optimizer, x, y)
        average.update(model)
        average.module.calls += 1  # feeds nothing: every call
        return loss

    model = mlp()
    twin = copy.deepcopy(model)
    averages = Counted(model, buffer), Counted(twin, buffer)
    for average in averages:
        average.module.register_buffer("calls", torch.zeros(()))
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, twin))
    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend=backend)
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(7)]
    for x, y in data:
        run(model, averages[0], mine, x, y)
    run.flush()
    eagerly(step, twin, averages[1], theirs, data, 2)  # type: ignore[arg-type]
    assert [a.module.count.item() for a in averages] == [4, 4]  # type: ignore[operator]
    assert [a.module.calls.item() for a in averages] == [7, 4]  # type: ignore[operator]
    for p, q in zip(averages[0].slow.parameters(), averages[1].slow.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.captured
def test_an_input_that_the_step_changes_is_data() -> None:
    """What a parameter becomes of it happens on every call, as of any other input."""

    def step(model: nn.Module, codes: nn.Parameter, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            codes.lerp_(x.mean(0), 0.1)
        x.mul_(0.5)
        return plain_step(model, optimizer, x + codes, y)

    model, codes = mlp(), nn.Parameter(torch.zeros(8), requires_grad=False)
    optimizer, wanted = torch.optim.SGD(model.parameters(), 0.1), torch.zeros(8)
    run = quick(step, 3)
    for _ in range(4):
        x = torch.randn(4, 8)
        wanted.lerp_(x.mean(0), 0.1)
        before = x.clone()
        run(model, codes, optimizer, x, torch.randn(4, 1))
        torch.testing.assert_close(codes.detach(), wanted)
        assert torch.equal(x, before * 0.5)
    run.discard()


@pytest.mark.captured
def test_outputs_keep_their_places_beside_writes_behind_the_graph() -> None:
    """torch 2.13 gives an input back in the place of another output."""

    class Held:
        total = torch.zeros(())

    def step(model: nn.Module, held: Held, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        for p in model.parameters():
            p.data.mul_(0.9)
        optimizer.step()
        optimizer.zero_grad()
        held.total += y.mean()
        return loss

    model, held = mlp(), Held()
    optimizer, run = torch.optim.SGD(model.parameters(), 0.1), quick(step, 2)
    total = held.total
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    wanted = mse(model, x, y).detach()
    torch.testing.assert_close(run(model, held, optimizer, x, y).detach(), wanted)
    assert held.total is total
    torch.testing.assert_close(total, y.mean())
    run.discard()
