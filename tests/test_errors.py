"""A step that cannot be optimized is refused by name: the culprit, what was seen, and the way out.

Arguments, what stands in the step, and its optimizers. What goes wrong later, between the calls of a window that has
begun, is in test_window_errors; ranks that disagree are in test_ranks_disagreement.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx import _torch
from gradsync_fx.capture.trace_state import observed
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.builder import Draft
from gradsync_fx.passes.verify import verify
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import mse, regression
from tests.refusals import refused


X, Y = torch.ones(4, 8), torch.ones(4, 1)


def arguments() -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    """A call's: model, optimizer, and a batch."""
    model = mlp()
    return model, sgd(model), X, Y


def line(step: Callable[..., Any], below: int) -> str:
    """A place in this file as errors name it."""
    return f"test_errors.py:{step.__code__.co_firstlineno + below}"


def test_every_error_is_a_gradsync_error() -> None:
    names = [n for n in gradsync_fx.__all__ if n.endswith("Error")]
    assert len(names) > 10
    assert all(issubclass(getattr(gradsync_fx, n), gradsync_fx.GradSyncError) for n in names)
    assert issubclass(gradsync_fx.GradSyncWarning, UserWarning)


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
@pytest.mark.parametrize("name", [n for n in gradsync_fx.__all__ if n.endswith("Error")])
def test_errors_pass_through_process_pools(name: str, again: Callable[[Any], Any]) -> None:
    error = getattr(gradsync_fx, name)("the step", seen="this", wanted="that", fix="change it")
    error.add_note("epoch 3")
    same = again(error)
    assert type(same) is type(error)
    assert str(same) == str(error)
    assert vars(same) == vars(error)


class Mine(gradsync_fx.CaptureError):
    """A subclass that takes other arguments."""

    def __init__(self, where: str) -> None:
        super().__init__(where, seen="this")


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda e: pickle.loads(pickle.dumps(e))]
)
def test_errors_of_other_arguments_are_copied_too(again: Callable[[Any], Any]) -> None:
    same = again(Mine("the step"))
    assert type(same) is Mine
    assert str(same) == str(Mine("the step"))


# Arguments of optimize


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "4"])
def test_window_lengths(k: Any) -> None:
    error = refused(
        gradsync_fx.OptionError, "gradient_accumulation_steps", lambda: quick(plain_step, k)
    )
    assert repr(k) in error.seen


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reduction", "max"),
        ("broadcast_buffers", True),
        ("bucket_cap_mb", 0),
        ("reduce_dtype", torch.int8),
    ],
)
def test_values(name: str, value: Any) -> None:
    refused(gradsync_fx.OptionError, name, lambda: quick(plain_step, 2, **{name: value}))


def test_unknown_arguments_list_the_legal_ones() -> None:
    error = refused(
        gradsync_fx.OptionError, "bucket_cap", lambda: quick(plain_step, 2, bucket_cap=1)
    )
    assert "bucket_cap_mb" in error.fix
    assert "reduce_dtype" in error.wanted


# What stands in the step


def test_no_optimizer() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        mse(model, x, y).backward()

    error = refused(gradsync_fx.NoOptimizerError, "the step", quick(step, 2), mlp(), X, Y)
    assert "optimizer.step()" in error.fix


def test_a_condition_on_the_loss() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        if loss > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()

    refused(gradsync_fx.CaptureError, line(step, 2), quick(step, 2), *arguments())


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
    error = refused(
        gradsync_fx.CaptureError, "", quick(step, 2), model, sgd(model), torch.arange(3)
    )
    assert "sparse" in str(error)


def test_a_gradient_hook() -> None:
    model, *others = arguments()
    next(model.parameters()).register_hook(lambda g: g * 2)
    step = quick(plain_step, 2)
    refused(gradsync_fx.CaptureError, "hook on '0.weight'", step, model, *others)


def test_sharpness_aware_steps() -> None:
    """They read a gradient before the boundary: moves are made of it, and the second backward sees them."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        mse(model, x, y).backward()
        with torch.no_grad():
            moved = [p.grad * 0.01 for p in model.parameters()]
            for p, m in zip(model.parameters(), moved, strict=True):
                p.add_(m)
        optimizer.zero_grad()
        mse(model, x, y).backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), moved, strict=True):
                p.sub_(m)
        optimizer.step()
        optimizer.zero_grad()

    kind = gradsync_fx.ReadBeforeBoundaryError
    error = refused(kind, "synced gradient of", quick(step, 2), *arguments())
    assert "test_errors.py:" in error.seen


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

    error = refused(gradsync_fx.ReadBeforeBoundaryError, "'0.weight'", quick(step, 2), *arguments())
    assert "test_errors.py:" in error.seen
    # With k = 1 nothing is deferred, and the step runs.
    quick(step, 1)(*arguments())


# Optimizers


def test_a_parameter_of_another_model() -> None:
    model, stranger = mlp(), sgd(mlp())
    kind, culprit = gradsync_fx.ForeignParameterError, "parameter 0 of group 0"
    refused(kind, culprit, quick(plain_step, 2), model, stranger, X, Y)


def test_an_optimizer_whose_update_depends_on_values() -> None:
    """No error: it runs as it is (test_opaque.py), and says so once."""

    class Picky(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is not None and p.grad.sum() > 0:
                    p.sub_(p.grad)

    model = mlp()
    with pytest.warns(gradsync_fx.GradSyncWarning, match=r"Picky.step .* cannot be traced"):
        quick(plain_step, 1)(model, Picky(model.parameters()), X, Y)


def test_an_optimizer_inside_backward() -> None:
    model = mlp()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        return loss

    refused(gradsync_fx.CaptureError, "'0.weight'", quick(step, 2), model, X, Y)


# The package itself


def test_patches_of_torch_are_undone() -> None:
    places = [
        (torch.nn.parallel.DistributedDataParallel, "forward"),
        (_torch.OptimizerVariable, _torch.READ_ATTRIBUTE),
        (_torch.UserDefinedObjectVariable, _torch.READ_ATTRIBUTE),
    ]
    before = [getattr(owner, name) for owner, name in places]
    config = _torch.dynamo_config.trace_autograd_ops
    quick(plain_step, 2)(*arguments())
    with pytest.raises(gradsync_fx.NoOptimizerError):
        quick(lambda m, x, y: F.mse_loss(m(x), y).backward(), 2)(mlp(), X, Y)
    assert [getattr(owner, name) for owner, name in places] == before
    assert _torch.dynamo_config.trace_autograd_ops == config
    with pytest.raises(gradsync_fx.CaptureError, match="not traced by gradsync_fx"):
        observed()


def test_a_program_that_breaks_its_specification() -> None:
    """The whole step, with its markers, passed off as an accumulate program."""
    step = quick(plain_step, 2)
    step(*arguments())
    captured = step._executor.catalogue.captures[0]
    draft = Draft.copy_of(
        "accumulate", captured.facts.capture.step, captured.facts.capture.fake_mode
    )
    with pytest.raises(VerificationError, match="accumulate program") as caught:
        verify(draft.finish(), captured.programs.plan, tail=False)
    assert "marker" in caught.value.seen


def test_a_gradient_scaler() -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step_with(scaler: torch.amp.GradScaler) -> Any:
        def step(x: Tensor, y: Tensor) -> Tensor:
            loss = mse(model, x, y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        return quick(step, 2)

    (batch,) = regression(1, 1)[0]
    error = refused(
        gradsync_fx.CaptureError, "GradScaler.scale", step_with(torch.amp.GradScaler("cpu")), *batch
    )
    assert "test_errors.py" in error.culprit
    assert "bfloat16" in error.fix
    off = step_with(torch.amp.GradScaler("cpu", enabled=False))
    for _ in range(2):
        off(*batch)
    assert off.optimizer_step == 1
