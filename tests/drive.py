"""Runs a step that gradsync_fx optimized over windows, and records what `reference.Run` records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.reference import Hook, LossOf, Run, Window, mse


def quick(step: Callable[..., Any], k: int = 1, **options: Any) -> gradsync_fx.OptimizedStep:
    """An optimized step without Inductor: torch's own kernels, and so eager's numbers."""
    options.setdefault("backend", "aot_eager")
    return gradsync_fx.optimize(step, gradient_accumulation_steps=k, **options)


def plain_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """Forward, backward, update, zero: the step of most tests."""
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def untraceable_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """`plain_step` with a branch on its loss, which a trace cannot take: it runs eagerly, or is refused."""
    loss = mse(model, x, y)
    if loss.item() > -1:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def checked_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """`plain_step` with asserts. It stands here because pytest rewrites those of a test's own file."""
    assert x.shape[0] == 4, "another batch"
    loss = mse(model, x, y)
    assert torch.isfinite(loss), "not finite"
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def step_of(
    loss_of: LossOf, between: Callable[[nn.Module], object] = lambda model: None
) -> Callable[..., Tensor]:
    """`plain_step` with another loss, or with something done to the gradients between backward and update."""

    def step(model: nn.Module, optimizer: Optimizer, *batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        between(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def drive(
    step: gradsync_fx.OptimizedStep,
    model: nn.Module,
    optimizer: Optimizer,
    windows: Sequence[Window],
    *,
    after: Hook | None = None,
) -> Run:
    """Every batch of every window through `step`; checks the counters on the way."""
    run = Run()
    for window in windows:
        for i, batch in enumerate(window):
            calls, updates = step.micro_step, step.optimizer_step
            result = step(model, optimizer, *batch)
            loss = result[0] if isinstance(result, tuple) else result
            assert isinstance(loss, torch.Tensor)
            assert not loss.requires_grad
            run.losses.append(loss.clone())
            last = i + 1 == len(window)
            assert step.sync_gradients is last
            assert step.pending == (0 if last else i + 1)
            assert step.micro_step == calls + 1
            assert step.optimizer_step == updates + last
            assert all(p.grad is None for p in model.parameters())
        if after is not None:
            after()
        run.updated(model)
    return run
