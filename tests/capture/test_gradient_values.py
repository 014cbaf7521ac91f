"""Gradients that are values, assigned to `.grad`: gradients like any other, in windows and over ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

import gradsync_fx
from tests.drive import quick
from tests.models import mlp
from tests.reference import mse
from tests.refusals import refused
from tests.scenarios import valued
from tests.scenarios.valued import end, per_sample
from tests.workers import Ranks


Step = Callable[[nn.Module, Any, Tensor, Tensor], Tensor]
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


def by_torch_func(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    params = {n: p.detach() for n, p in model.named_parameters()}
    grads, loss = grad_and_value(
        lambda p: nn.functional.mse_loss(functional_call(model, p, (x,)), y)
    )(params)
    for name, p in model.named_parameters():
        p.grad = grads[name]
    end(optimizer)
    return loss


def by_autograd_grad(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    params = list(model.parameters())
    for p, g in zip(params, torch.autograd.grad(loss, params), strict=True):
        p.grad = g
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    end(optimizer)
    return loss


def projected(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """One task's gradient without what opposes the other's."""
    out = model(x)
    one, two = (out - y).square().mean(), out.abs().mean()
    params = list(model.parameters())
    first = torch.autograd.grad(one, params, retain_graph=True)
    second = torch.autograd.grad(two, params)
    dot = torch.stack([(a * b).sum() for a, b in zip(first, second, strict=True)]).sum()
    size = torch.stack([b.square().sum() for b in second]).sum()
    for p, a, b in zip(params, first, second, strict=True):
        p.grad = a - torch.clamp(dot / size, max=0.0) * b
    end(optimizer)
    return one


def by_hand(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    """backward() for the body, and a value for the last bias."""
    loss = mse(model, x, y)
    loss.backward()
    with torch.no_grad():
        list(model.parameters())[-1].grad = (model(x) - y).mean().reshape(1)
    end(optimizer)
    return loss


def mean_of(step: Step, model: nn.Module, optimizer: Any, window: list[Any], clip: bool) -> None:
    """One update with the mean of what each micro-batch alone would be updated with."""
    total: list[Tensor] = [torch.zeros_like(p) for p in model.parameters()]
    for x, y in window:
        alone = copy.deepcopy(model)
        if clip:  # of the window's gradient, then
            loss = mse(alone, x, y)
            grads = torch.autograd.grad(loss, list(alone.parameters()))
        else:
            step(alone, torch.optim.SGD(alone.parameters(), 1.0), x, y)
            grads = tuple(
                p.detach() - q.detach()
                for p, q in zip(model.parameters(), alone.parameters(), strict=True)
            )
        for held, g in zip(total, grads, strict=True):
            held += g / len(window)
    for p, g in zip(model.parameters(), total, strict=True):
        p.grad = g
    if clip:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    end(optimizer)


@pytest.mark.captured
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("step", [by_torch_func, by_autograd_grad, per_sample, projected, by_hand])
def test_windows_of_gradients_that_are_values(step: Step, backend: str) -> None:
    model = mlp()
    twin = copy.deepcopy(model)
    mine, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (model, twin))
    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend=backend)
    data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(5)]
    for x, y in data:
        run(model, mine, x, y)
    run.flush()
    for n in range(0, 5, 2):
        mean_of(step, twin, theirs, data[n : n + 2], step is by_autograd_grad)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)
        assert p.grad is None


@pytest.mark.captured
def test_a_gradient_changed_under_its_first_name() -> None:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        params = list(model.parameters())
        grads = torch.autograd.grad(mse(model, x, y), params)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
            g.mul_(0.5)
        end(optimizer)

    model = mlp()
    run = quick(step, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(4, 8), torch.randn(4, 1)
    error = refused(gradsync_fx.CaptureError, "a gradient", lambda: run(model, optimizer, *batch))
    assert "p.grad itself" in error.fix


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_per_sample_clipping_on_two_ranks(ranks: Ranks) -> None:
    one, two = ranks(valued.private)
    for ours, others, theirs in zip(one["ours"], two["ours"], one["whole"], strict=True):
        assert torch.equal(ours, others)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)
    assert one["all_reduces"] == [0, 1, 0, 1]
