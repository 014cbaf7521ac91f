"""Errors as a user causes them: culprit, seen, wanted, what to do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx import _torch
from gradsync_fx.interception import observed
from tests.loops import batches, mlp, optimized, plain_step


def raises(
    kind: type[gradsync_fx.GradSyncError], culprit: str, run: Any, *args: Any
) -> gradsync_fx.GradSyncError:
    with pytest.raises(kind) as caught:
        run(*args)
    error = caught.value
    assert culprit in error.culprit, str(error)
    assert error.seen
    assert error.fix
    assert str(error).startswith(error.culprit)
    return error


def trained() -> tuple[nn.Module, Optimizer, Tensor, Tensor]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), 0.1), *batches(1)[0]


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "4"])
def test_window_lengths(k: Any) -> None:
    error = raises(
        gradsync_fx.OptionError, "gradient_accumulation_steps", lambda: optimized(plain_step, k)
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
    raises(gradsync_fx.OptionError, name, lambda: optimized(plain_step, 2, **{name: value}))


def test_unknown_arguments_list_the_legal_ones() -> None:
    error = raises(
        gradsync_fx.OptionError, "bucket_cap", lambda: optimized(plain_step, 2, bucket_cap=1)
    )
    assert "bucket_cap_mb" in error.fix
    assert "reduce_dtype" in error.wanted


def test_no_optimizer() -> None:
    def step(model: nn.Module, x: Tensor, y: Tensor) -> None:
        F.mse_loss(model(x), y).backward()

    model, _, x, y = trained()
    error = raises(gradsync_fx.NoOptimizerError, "the step", optimized(step, 2), model, x, y)
    assert "optimizer.step()" in error.fix


def test_no_gradient() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        optimizer.step()
        return loss.detach()

    raises(gradsync_fx.NoGradientError, "the step", optimized(step, 2), *trained())


def test_a_parameter_of_another_model() -> None:
    model, _, x, y = trained()
    stranger = torch.optim.SGD(mlp().parameters(), 0.1)
    raises(
        gradsync_fx.ForeignParameterError,
        "parameter 0 of group 0",
        optimized(plain_step, 2),
        model,
        stranger,
        x,
        y,
    )


def test_a_graph_break_names_the_line() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = F.mse_loss(model(x), y)
        if loss > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()

    line = step.__code__.co_firstlineno + 2
    raises(gradsync_fx.CaptureError, f"test_messages.py:{line}", optimized(step, 2), *trained())


def test_another_model() -> None:
    run = optimized(plain_step, 2)
    run(*trained())
    raises(gradsync_fx.WindowError, "", run, *trained())


def test_a_gradient_hook() -> None:
    model, optimizer, x, y = trained()
    next(model.parameters()).register_hook(lambda g: g * 2)
    raises(
        gradsync_fx.CaptureError,
        "hook on '0.weight'",
        optimized(plain_step, 2),
        model,
        optimizer,
        x,
        y,
    )


def sharpness_aware(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        moved = [p.grad * 0.01 for p in model.parameters()]
        for p, m in zip(model.parameters(), moved, strict=True):
            p.add_(m)
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    with torch.no_grad():
        for p, m in zip(model.parameters(), moved, strict=True):
            p.sub_(m)
    optimizer.step()
    optimizer.zero_grad()


def test_a_gradient_read_before_the_boundary() -> None:
    error = raises(
        gradsync_fx.ReadBeforeBoundaryError,
        "synced gradient of",
        optimized(sharpness_aware, 2),
        *trained(),
    )
    assert "test_messages.py:" in error.seen


def test_another_k_inside_a_window() -> None:
    run = optimized(plain_step, 4)
    run(*trained())
    error = raises(
        gradsync_fx.WindowError,
        "gradient_accumulation_steps",
        run.set_gradient_accumulation_steps,
        8,
    )
    assert "from 4 to 8 with 1 pending" in error.seen


def test_skip_and_report_before_the_first_call() -> None:
    run = optimized(plain_step, 2)
    raises(gradsync_fx.WindowError, "skip", run.skip)
    raises(gradsync_fx.WindowError, "report", run.report)


def test_versions_of_torch_outside_the_tested_range() -> None:
    error = raises(gradsync_fx.VersionError, "torch", _torch.check_version, (2, 4))
    assert "2.4 is installed" in error.seen
    _torch.check_version((2, 13))


def test_patches_of_torch_are_undone() -> None:
    places = [
        (torch.nn.parallel.DistributedDataParallel, "forward"),
        (_torch.TensorVariable, "method_backward"),
        (_torch.OptimizerVariable, "var_getattr"),
        (_torch.UserDefinedObjectVariable, "var_getattr"),
    ]
    before = [getattr(owner, name) for owner, name in places]
    config = _torch.dynamo_config.trace_autograd_ops
    run = optimized(plain_step, 2)
    run(*trained())
    with pytest.raises(gradsync_fx.NoOptimizerError):
        optimized(lambda m, x, y: F.mse_loss(m(x), y).backward(), 2)(mlp(), *batches(1)[0])
    assert [getattr(owner, name) for owner, name in places] == before
    assert _torch.dynamo_config.trace_autograd_ops == config
    with pytest.raises(gradsync_fx.CaptureError, match="not traced by gradsync_fx"):
        observed()
