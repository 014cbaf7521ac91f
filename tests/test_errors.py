"""Refusals and warnings of a running step, as a user causes them: the culprit's name, and the way out."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.draft import Draft
from gradsync_fx.errors import VerificationError
from gradsync_fx.verify import verify
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import mse


X, Y = torch.ones(4, 8), torch.ones(4, 1)


def sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def refused(kind: type[gradsync_fx.GradSyncError], call: Callable[..., Any], *args: Any) -> Any:
    """The error, after a look at its form: all four parts, and the text made of them."""
    with pytest.raises(kind) as caught:
        call(*args)
    error = caught.value
    assert type(error) is kind
    assert error.culprit
    assert error.seen
    assert error.fix
    assert error.culprit in str(error)
    assert error.seen in str(error)
    assert error.fix in str(error)
    return error


def test_every_error_is_a_gradsync_error() -> None:
    names = [n for n in gradsync_fx.__all__ if n.endswith("Error")]
    assert len(names) > 10
    assert all(issubclass(getattr(gradsync_fx, n), gradsync_fx.GradSyncError) for n in names)
    assert issubclass(gradsync_fx.GradSyncWarning, UserWarning)


def test_an_optimizer_whose_update_depends_on_values() -> None:
    class Picky(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and p.grad.sum() > 0:
                    p.sub_(p.grad)

    model = mlp()
    error = refused(
        gradsync_fx.UpdateError, quick(plain_step, 1), model, Picky(model.parameters()), X, Y
    )
    assert "Picky" in error.culprit


def test_an_optimizer_with_pre_hooks() -> None:
    model = mlp()
    optimizer = sgd(model)
    optimizer.register_step_pre_hook(lambda *_: None)
    error = refused(gradsync_fx.UpdateError, quick(plain_step, 2), model, optimizer, X, Y)
    assert "SGD" in error.culprit


def test_another_optimizer_object() -> None:
    model = mlp()
    step = quick(plain_step, 2)
    step(model, sgd(model), X, Y)
    error = refused(gradsync_fx.WindowError, step, model, sgd(model), X, Y)
    assert "optimizer SGD" in error.culprit


def test_an_optimizer_inside_backward() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        return loss

    error = refused(gradsync_fx.CaptureError, quick(step, 2), model, X, Y)
    assert "'0.weight'" in error.culprit


def test_a_print_in_the_step() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        print(loss.item())
        loss.backward()
        optimizer.step()

    model = mlp()
    error = refused(gradsync_fx.CaptureError, quick(step, 2), model, sgd(model), X, Y)
    assert f"test_errors.py:{step.__code__.co_firstlineno + 2}" in error.culprit


def test_sparse_gradients() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 4, sparse=True)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.emb(tokens).sum()

    def step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
        loss = model(tokens)
        loss.backward()
        optimizer.step()
        return loss

    model = Words()
    error = refused(gradsync_fx.CaptureError, quick(step, 2), model, sgd(model), torch.arange(3))
    assert "sparse" in str(error)


def test_requires_grad_changed_inside_a_window() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 4)
    step(model, optimizer, X, Y)
    step(model, optimizer, X, Y)
    model[0].weight.requires_grad_(False)
    error = refused(gradsync_fx.WindowError, step, model, optimizer, X, Y)
    assert "'0.weight'" in str(error)


def test_requires_grad_changed_at_a_boundary_is_captured_anew() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    for _ in range(2):
        step(model, optimizer, X, Y)
    model[0].weight.requires_grad_(False)
    frozen, moving = model[0].weight.clone(), model[2].weight.detach().clone()
    for _ in range(2):
        step(model, optimizer, X, Y)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, moving)


def test_a_gradient_of_the_users_is_dropped_with_a_warning() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    step(model, optimizer, X, Y)
    model[0].weight.grad = torch.full_like(model[0].weight, 100.0)
    before = step.gradients()["0.weight"].clone()
    with pytest.warns(gradsync_fx.GradSyncWarning, match=r"'0\.weight'"):
        step(model, optimizer, X, Y)
    assert model[0].weight.grad is None
    assert model[0].weight.abs().max() < 50
    assert before.abs().max() < 50


def test_a_gradient_left_before_the_first_call_is_dropped_with_a_warning() -> None:
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    mse(model, X, Y).backward()
    step = quick(plain_step, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="dropped"):
        step(model, sgd(model), X, Y)
    plain_step(other, sgd(other), X, Y)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_a_window_without_a_term_makes_no_update_and_warns() -> None:
    model = mlp()
    step = quick(plain_step, 2)
    step.prepare(model, sgd(model), X, Y)
    start = model[0].weight.detach().clone()
    step.skip()
    with pytest.warns(gradsync_fx.GradSyncWarning, match="no update"):
        step.skip()
    assert torch.equal(model[0].weight, start)
    assert (step.micro_step, step.optimizer_step, step.pending) == (2, 0, 0)
    assert not step.sync_gradients


def test_an_ordinary_run_warns_of_nothing() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(model, optimizer, X, Y)
        step(model, optimizer, X, Y)
        step.flush()


def test_an_error_in_the_step_leaves_the_window_as_it_was() -> None:
    """A batch of a wrong width is refused; the next right one goes on."""
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 3)
    step(model, optimizer, X, Y)
    sums = {name: t.clone() for name, t in step.gradients().items()}
    with pytest.raises(Exception, match=r"(?s)."):
        step(model, optimizer, torch.ones(4, 5), Y)
    assert step.pending == 1
    assert all(torch.equal(t, sums[name]) for name, t in step.gradients().items())
    step(model, optimizer, X, Y)
    step(model, optimizer, X, Y)
    assert step.sync_gradients


def test_a_program_that_breaks_its_specification() -> None:
    """The whole step, with its markers, passed off as an accumulate program."""
    model = mlp()
    step = quick(plain_step, 2)
    step(model, sgd(model), X, Y)
    captured = step._executor.captures[0]
    draft = Draft.copy_of("accumulate", captured.capture.step, captured.capture.fake_mode)
    with pytest.raises(VerificationError, match="accumulate program") as caught:
        verify(draft.finish(), captured.plan)
    assert "marker" in caught.value.seen


def test_a_loss_that_reads_a_reduced_gradient() -> None:
    """A gradient penalty: the second backward depends on the first one's gradient."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        scale = model[0].weight.grad.detach().norm()  # type: ignore[index,union-attr]
        optimizer.zero_grad()
        loss = F.mse_loss(model(x * scale), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = mlp()
    error = refused(gradsync_fx.ReadBeforeBoundaryError, quick(step, 2), model, sgd(model), X, Y)
    assert "'0.weight'" in error.culprit
    assert "test_errors.py:" in error.seen
    # With k = 1 nothing is deferred, and the step runs.
    quick(step, 1)(model, sgd(model), X, Y)
