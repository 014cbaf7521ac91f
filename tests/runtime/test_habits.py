"""What is left of plain accumulation in a step, or in the loop around it, is warned about at the first call, once."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import accumulation, assert_same_parameters, mse, regression, twins


K = 4
N = 4
X, Y = torch.ones(4, 8), torch.ones(4, 1)
Loss = Callable[[nn.Module, Tensor, Tensor], Tensor]


@pytest.fixture(autouse=True)
def all_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        yield


def step_of(loss_of: Loss) -> Any:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def said(run: Callable[[], object]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    found = [w for w in caught if issubclass(w.category, gradsync_fx.GradSyncWarning)]
    # Steps of other tests say at their end, whenever that is, that a window is open.
    found = [w for w in found if "pending micro-step" not in str(w.message)]
    assert all(w.filename == __file__ for w in found)
    return [str(w.message) for w in found]


def said_by(step: Any, k: Any = K, **options: Any) -> list[str]:
    model, run = mlp(), quick(step, k, **options)
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(2 * K):
            run(model, optimizer, X, Y)

    return said(loop)


DIVIDED: dict[str, Loss] = {
    "by k": lambda m, x, y: mse(m, x, y) / K,
    "by another name of k": lambda m, x, y: mse(m, x, y) / N,
    "by a product": lambda m, x, y: mse(m, x, y) * (1 / K),
    "in each term": lambda m, x, y: mse(m, x, y) / K + m[0].weight.square().sum() / K,  # type: ignore[index,union-attr,operator]
    "behind a factor": lambda m, x, y: 0.5 * mse(m, x, y) / K,
}


@pytest.mark.parametrize("name", DIVIDED)
def test_a_division_by_k_is_said_once_with_both_ways_out(name: str) -> None:
    step = step_of(DIVIDED[name])
    (text,) = said_by(step)
    line = DIVIDED[name].__code__.co_firstlineno
    assert f"test_habits.py:{line}" in text
    assert "leave the division out" in text
    assert 'reduction="sum"' in text
    model = mlp()
    verdict = quick(step, K).self_check(model, sgd(model), X, Y)
    assert verdict.equal
    assert verdict.warnings == (text,)
    assert text in str(verdict)
    assert said_by(step, reduction="sum") == []


MEANS: dict[str, Loss] = {
    "of all elements": lambda m, x, y: (m(x) - y).square().sum() / 4,
    "of rows": lambda m, x, y: (m(x) - y).square().sum(0).sum() / x.shape[0],
    "of terms": lambda m, x, y: (
        (mse(m, x, y) + mse(m, x * 2, y) + mse(m, x * 3, y) + mse(m, x * 4, y)) / 4
    ),
    "another number": lambda m, x, y: mse(m, x, y) / 3,
    "of logits": lambda m, x, y: mse(lambda given: m(given) / 4, x, y),  # type: ignore[arg-type]
    "nothing": mse,
}


@pytest.mark.parametrize("name", MEANS)
def test_other_divisions_are_not(name: str) -> None:
    assert said_by(step_of(MEANS[name])) == []


def test_both_ways_out_are_right() -> None:
    for loss_of, options in ((mse, {}), (DIVIDED["by k"], {"reduction": "sum"})):
        ours, eager = twins(mlp())
        optimizer, run = sgd(ours), quick(step_of(loss_of), K, **options)
        data = regression(2, K)
        for window in data:
            for x, y in window:
                run(ours, optimizer, x, y)
        accumulation(eager, sgd(eager), data)
        assert_same_parameters(ours, eager)


def without_zero(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    loss.backward()
    optimizer.step()
    return loss


def zero_first(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    optimizer.zero_grad()
    return without_zero(model, optimizer, x, y)


def zero_of_the_model(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    model.zero_grad()
    return without_zero(model, optimizer, x, y)


def by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    for p in model.parameters():
        p.grad = None
    return without_zero(model, optimizer, x, y)


def assigned(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    parameters = list(model.parameters())
    for p, g in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
        p.grad = g
    optimizer.step()
    return loss


def test_no_zero_grad_anywhere() -> None:
    (text,) = said_by(without_zero)
    assert "zero_grad" in text
    assert "after optimizer.step()" in text
    for step in (plain_step, zero_first, zero_of_the_model, by_hand, assigned):
        assert said_by(step) == [], step.__name__


def test_zero_grad_in_the_loop() -> None:
    model, run = mlp(), quick(without_zero, K)
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(K):
            optimizer.zero_grad()
            run(model, optimizer, X, Y)

    assert said(loop) == []


def test_clipping_behind_the_call() -> None:
    model, run = mlp(), quick(plain_step, K)
    optimizer = sgd(model)

    def loop() -> None:
        for _ in range(2 * K):
            run(model, optimizer, X, Y)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    (text,) = said(loop)
    line = loop.__code__.co_firstlineno + 3
    assert f"clip_grad_norm_ at {__file__}:{line}" in text
    assert "between backward() and optimizer.step()" in text


def test_the_rest_of_an_accumulation_loop() -> None:
    model, run = mlp(), quick(plain_step, K)
    optimizer = sgd(model)

    def loop() -> None:
        for i in range(2 * K):
            run(model, optimizer, X, Y)
            if (i + 1) % K == 0:
                optimizer.step()
                optimizer.zero_grad()

    (text,) = said(loop)
    assert f"optimizer.step() at {__file__}:{loop.__code__.co_firstlineno + 4}" in text
    assert "step.sync_gradients" in text


def test_contexts_round_the_call() -> None:
    class Accelerator:
        def accumulate(self, model: nn.Module) -> Any:
            return contextlib.nullcontext()

        no_sync = accumulate

    accelerator, model, run = Accelerator(), mlp(), quick(plain_step, K)
    again, optimizer = quick(plain_step, K), sgd(model)

    def accumulating() -> None:
        for _ in range(K):
            with accelerator.accumulate(model):
                run(model, optimizer, X, Y)

    def unsynced() -> None:
        for i in range(K):
            with accelerator.no_sync(model) if i < K - 1 else contextlib.nullcontext():
                again(model, optimizer, X, Y)

    assert ["accumulate at" in text for text in said(accumulating)] == [True]
    assert ["no_sync at" in text for text in said(unsynced)] == [True]


def test_loops_that_are_right_are_not_warned_about() -> None:
    model, run, other = mlp(), quick(plain_step, K), mlp()
    again, third = quick(plain_step, K), quick(plain_step, K)
    optimizer, own = sgd(model), sgd(other)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def scheduled() -> None:
        for i in range(2 * K):
            run(model, optimizer, X, Y)
            if run.sync_gradients:
                scheduler.step()
            if (i + 1) % K == 0:
                assert i

    def beside_another() -> None:
        for _ in range(K):
            again(model, optimizer, X, Y)
            F.mse_loss(other(X), Y).backward()
            torch.nn.utils.clip_grad_norm_(other.parameters(), 1.0)
            own.step()
            own.zero_grad()

    def alone() -> None:
        third(model, optimizer, X, Y)

    for loop in (scheduled, beside_another, alone):
        assert said(loop) == [], loop.__name__


def test_a_condition_in_the_step() -> None:
    """The error names both ways out, and both work."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, i: int) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        if (i + 1) % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    model = mlp()
    with pytest.raises(gradsync_fx.NoOptimizerError) as caught:
        quick(step, 2)(model, sgd(model), X, Y, 0)
    assert "% k" in caught.value.fix
    assert '"manual"' in caught.value.fix
    ours, eager = twins(mlp())
    optimizer, run = sgd(ours), quick(step, "manual")
    data = regression(2, 2)
    for window in data:
        for i, (x, y) in enumerate(window):
            run(ours, optimizer, x, y, i)
    accumulation(eager, sgd(eager), data)
    assert_same_parameters(ours, eager)
