"""What only an eager step has: why it runs so, what it refuses, and what an error leaves behind."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as imported_clip
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import quick
from tests.models import mlp
from tests.reference import accumulation, mse, regression
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        yield


def branching(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    """It looks at a value that only the program knows, so that it cannot be captured."""
    loss = mse(model, x, y)
    loss.backward()
    if loss.item() > 1e9:
        raise OverflowError
    imported_clip(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def eager(step: Any = branching, k: int = 2, **options: Any) -> gradsync_fx.OptimizedStep:
    return quick(step, k, on_unsupported="eager", **options)


def fresh(kind: Any = torch.optim.SGD) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, kind(model.parameters(), lr=0.1)


def test_it_says_so_once_and_says_why() -> None:
    model, optimizer = fresh()
    step = eager()
    (window,) = regression(1, 2)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="runs eagerly"):
        step(model, optimizer, *window[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(model, optimizer, *window[1])
    report = step.report()
    assert "test_window.py:" in report.refusals[0]
    assert "zuf0 > 1000000000" in report.refusals[0]
    assert [p.name for p in report.parameters if p.trained] == [
        n for n, _ in model.named_parameters()
    ]
    assert '"refusals"' in report.to_json()
    assert "not captured" in str(report)
    assert report.to_html()


def test_by_default_it_is_refused() -> None:
    model, optimizer = fresh()
    (window,) = regression(1, 1)
    error = refused(
        gradsync_fx.CaptureError,
        "test_window.py:",
        quick(branching, 2),
        model,
        optimizer,
        *window[0],
    )
    assert 'on_unsupported="eager"' in error.fix


def test_a_clipping_that_was_imported_by_name_and_a_compiled_model() -> None:
    """The function object is the user's: its insides are answered. The model's own compilation stays."""
    model, optimizer = fresh(torch.optim.AdamW)
    other, theirs = fresh(torch.optim.AdamW)
    compiled = torch.compile(model, backend="aot_eager")
    windows = regression(3, 2)
    step = eager()
    for window in windows:
        for batch in window:
            step(compiled, optimizer, *batch)
    accumulation(
        other, theirs, windows, before=lambda: nn.utils.clip_grad_norm_(other.parameters(), 0.5)
    )
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


def test_torch_is_as_before() -> None:
    def parts() -> tuple[Any, ...]:
        return (
            torch.autograd.backward,
            torch.optim.SGD.step,
            torch.optim.lr_scheduler.LRScheduler.step,
            nn.Module.zero_grad,
            nn.parallel.DistributedDataParallel.forward,
            nn.utils.clip_grad._clip_grads_with_norm_,
            nn.utils.clip_grad_value_,
        )

    before = parts()
    model, optimizer = fresh()
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    counted = vars(optimizer)["step"]
    step = eager()
    for batch in regression(1, 2)[0]:
        step(model, optimizer, *batch)
    with pytest.raises(RuntimeError):
        step(model, optimizer, torch.ones(2, 3), torch.ones(2, 1))
    assert parts() == before
    assert vars(optimizer)["step"] is counted
    scheduler.step()  # warns, and so fails, had the optimizer not been seen to step


def test_an_error_before_the_end_of_a_window_leaves_it_as_it_was() -> None:
    model, optimizer = fresh()
    step = eager(k=3)
    window = regression(1, 3)[0]
    step(model, optimizer, *window[0])
    sums = {name: g.clone() for name, g in step.gradients().items()}
    with pytest.raises(OverflowError):
        step(model, optimizer, window[1][0] * 1e9, window[1][1])
    assert step.pending == 1
    assert all(torch.equal(g, sums[name]) for name, g in step.gradients().items())
    assert all(p.grad is None for p in model.parameters())


def test_an_error_behind_the_reduction_leaves_a_window_that_is_void() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, bad: bool) -> None:
        loss = mse(model, x, y)
        loss.backward()
        if loss.item() > 1e9:
            raise OverflowError
        optimizer.step()
        if bad:
            raise ZeroDivisionError

    model, optimizer = fresh()
    run = eager(step)
    first, second = regression(1, 2)[0]
    run(model, optimizer, *first, False)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(ZeroDivisionError):
        run(model, optimizer, *second, True)
    assert not torch.equal(before[0], next(model.parameters()))
    error = refused(gradsync_fx.WindowError, "step", run, model, optimizer, *first, False)
    assert "void" in error.seen
    refused(gradsync_fx.WindowError, "discard", run.discard)


def by_hand(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    loss = mse(model, x, y)
    loss.backward()
    if loss.item() > 1e9:
        raise OverflowError
    for p in model.parameters():
        p.grad.clamp_(-0.1, 0.1)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("k", [1, 3])
def test_gradients_changed_by_hand_are_the_windows(k: int) -> None:
    model, optimizer = fresh()
    twin, theirs = fresh()
    step, windows = eager(by_hand, k), regression(2, k)
    for batch in (b for window in windows for b in window):
        step(model, optimizer, *batch)

    def clamp() -> None:
        for p in twin.parameters():
            p.grad.clamp_(-0.1, 0.1)  # type: ignore[union-attr]

    accumulation(twin, theirs, windows, before=clamp)
    for mine, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(mine, other, atol=1e-6, rtol=0)


def test_gradients_changed_by_hand_where_the_step_ends_windows_are_refused() -> None:
    model, optimizer = fresh()
    batch = regression(1, 1)[0][0]
    step = eager(by_hand, "manual")  # type: ignore[arg-type]
    refused(gradsync_fx.CaptureError, "gradient of '0.weight'", step, model, optimizer, *batch)


def test_sparse_gradients_are_summed() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 4, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.emb(tokens).pow(2).sum()

    def step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    model = Words()
    before = model.emb.weight.detach().clone()
    run, optimizer = eager(step), torch.optim.SGD(model.parameters(), lr=0.1)
    for tokens in ([1, 2], [2, 3]):
        run(model, optimizer, torch.tensor(tokens))
    gradient = torch.zeros_like(before)
    gradient[1], gradient[2], gradient[3] = before[1], 2 * before[2], before[3]
    torch.testing.assert_close(model.emb.weight.detach(), before - 0.1 * gradient)


def test_sync_each_batch_needs_a_capture() -> None:
    model, optimizer = fresh()
    step = eager(sync_each_batch=True)
    refused(
        gradsync_fx.OptionError,
        "'sync_each_batch'",
        step,
        model,
        optimizer,
        *regression(1, 1)[0][0],
    )


def test_closures_are_refused() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        loss.backward()
        if loss.item() > 1e9:
            raise OverflowError
        optimizer.step(lambda: 0.0)

    model, optimizer = fresh()
    refused(
        gradsync_fx.UpdateError, "SGD.step", eager(step), model, optimizer, *regression(1, 1)[0][0]
    )
