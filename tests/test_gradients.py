"""What a step does with its gradients, between backward and update and around them, it does to those of the window.

Clipping; zeroing, in every place and spelling; several backwards in one step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import drive, quick, step_of
from tests.models import Lin, mlp
from tests.optimizers import sgd
from tests.reference import (
    accumulation,
    assert_same,
    assert_same_parameters,
    assert_same_tensors,
    mse,
    regression,
    twins,
)


def clip_norm(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def clip_norm_foreach(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)


def clip_value(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)


@pytest.mark.parametrize("clip", [clip_norm, clip_norm_foreach, clip_value])
def test_clipping_is_of_the_window(clip: Callable[[nn.Module], object]) -> None:
    ours, eager, free = twins(mlp(), 3)
    data = regression(5, 3)
    mine = drive(quick(step_of(mse, clip), 3), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data, before=lambda: clip(eager)), atol=1e-6)
    unclipped = accumulation(free, sgd(free), data).updates[0]["0.weight"]
    assert not torch.allclose(mine.updates[0]["0.weight"], unclipped, atol=1e-4)


def test_a_clipped_norm_is_nan_until_the_boundary() -> None:
    def normed(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = mse(model, x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(normed, 2)
    for window in regression(5, 2):
        norms = [step(ours, optimizer, *batch)[1] for batch in window]
        for batch in window:
            (mse(eager, *batch) / 2).backward()
        wanted = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
        assert norms[0].isnan()
        torch.testing.assert_close(norms[1], wanted, atol=1e-6, rtol=1e-5)


ZERO: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer-set": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer-zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "module-zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "never": lambda model, optimizer: None,
}


@pytest.mark.parametrize("place", ["top", "end"])
@pytest.mark.parametrize("how", ZERO)
def test_zeroing(how: str, place: str) -> None:
    """Zeroing is part of the update, wherever it stands in the step and however it is written."""
    zero = ZERO[how]

    def step_with_zeroing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if place == "top":
            zero(model, optimizer)
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        if place == "end":
            zero(model, optimizer)
        return loss

    ours, eager = twins(mlp())
    data = regression(5, 2)
    mine = drive(quick(step_with_zeroing, 2), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data), atol=1e-6)


def test_gradients_zeroed_between_two_backwards_count_once() -> None:
    """The first backward is thrown away: only the second reaches the update."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        out = model(x)
        (3 * out).backward(retain_graph=True)
        optimizer.zero_grad()
        out.backward()
        optimizer.step()
        return out

    model = Lin()
    optimizer = sgd(model, 1.0)
    run = quick(step, 2)
    for x in (2.0, 4.0):
        run(model, optimizer, torch.tensor(x))
    assert model.w.item() == -3.0


def test_two_backwards_on_one_forward() -> None:
    """w * 1 and w * 2: each micro-step adds 3."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        out = model(x)
        first, second = out * 1, out * 2
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first + second

    model = Lin()
    optimizer = sgd(model, 1.0)
    run = quick(step, 2)
    for window in range(1, 6):
        for _ in range(2):
            run(model, optimizer, torch.tensor(1.0))
        assert model.w.item() == -3.0 * window


def test_three_forwards_then_three_backwards() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        losses = [mse(model, x * scale, y) for scale in (1.0, 2.0, 3.0)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses[0].detach()

    def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) + mse(model, x * 2.0, y) + mse(model, x * 3.0, y)

    ours, eager = twins(mlp())
    data = regression(5, 2)
    mine = drive(quick(step, 2), ours, sgd(ours, 0.01), data)
    theirs = accumulation(eager, sgd(eager, 0.01), data, total)
    assert_same_tensors(mine, theirs, atol=1e-6)


def test_sharpness_aware_step_without_accumulation() -> None:
    """Reads its gradient, moves, and runs a second backward: with k = 1 nothing is deferred, and it runs."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        mse(model, x, y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    run = quick(step, 1)
    for window in regression(5, 1):
        run(ours, optimizer, *window[0])
        step(eager, reference, *window[0])
        assert_same_parameters(ours, eager)
