"""While a step is traced Dynamo is patched; before and after, also on errors, it is torch's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx._torch import (
    READ_ATTRIBUTE,
    InstructionTranslatorBase,
    LoggingLoggerVariable,
    OptimizerVariable,
    TensorVariable,
    UserDefinedObjectVariable,
    dynamo_config,
)
from gradsync_fx.capture.patches import intercepting
from gradsync_fx.capture.trace_state import Observed, observed
from tests.drive import plain_step, quick
from tests.models import mlp


def answer_at_backward() -> Any:
    """Since torch 2.14 in a table of methods."""
    listed = getattr(TensorVariable, "tp_methods", {}).get("backward")
    return TensorVariable.method_backward if listed is None else listed.handler


def torchs_own() -> dict[str, Any]:
    """Everything that tracing changes."""
    return {
        "user": getattr(UserDefinedObjectVariable, READ_ATTRIBUTE),
        "optimizer": getattr(OptimizerVariable, READ_ATTRIBUTE),
        "backward": answer_at_backward(),
        "ddp": DistributedDataParallel.forward,
        "autograd": dynamo_config.trace_autograd_ops,
        "optimize_ddp": dynamo_config.optimize_ddp,
        "logging": dynamo_config.ignore_logging_functions,
        "limit": dynamo_config.recompile_limit,
        "scalars": dynamo_config.capture_scalar_outputs,
        "print": dynamo_config.reorderable_logging_functions,
        "calls": InstructionTranslatorBase.call_function,
        "formats": InstructionTranslatorBase._format_value,
        "attributes": InstructionTranslatorBase._load_attr,
        "loggers": LoggingLoggerVariable.call_method,
    }


def test_patches_are_in_force_inside_only() -> None:
    before = torchs_own()
    with intercepting(Observed()) as seen:
        assert observed() is seen
        inside = torchs_own()
        assert all(inside[n] != before[n] for n in ("user", "optimizer", "backward", "ddp"))
        assert inside["autograd"] is True
    assert torchs_own() == before


def test_patches_are_undone_on_errors() -> None:
    before = torchs_own()
    with pytest.raises(ZeroDivisionError), intercepting(Observed()):
        raise ZeroDivisionError
    assert torchs_own() == before
    with pytest.raises(gradsync_fx.CaptureError):
        observed()


def test_a_trace_inside_a_trace_leaves_the_outer_one() -> None:
    with intercepting(Observed()) as outer:
        with intercepting(Observed()) as inner:
            assert observed() is inner
        assert observed() is outer


def test_nothing_stays_patched_after_a_step() -> None:
    before = torchs_own()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = quick(plain_step, 2)
    for _ in range(2):
        step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    assert torchs_own() == before
    # torch's own compiler and autograd are as they were.
    compiled = torch.compile(lambda x: x * 2, backend="eager")
    assert torch.equal(compiled(torch.ones(2)), torch.full((2,), 2.0))
    mlp()(torch.randn(4, 8)).sum().backward()


def test_nothing_stays_patched_after_a_refusal() -> None:
    def broken(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        loss = model(x).sum()
        if loss > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    before = torchs_own()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(gradsync_fx.CaptureError):
        quick(broken, 2)(model, optimizer, torch.randn(4, 8))
    assert torchs_own() == before


def test_the_optimizer_stays_the_users_object() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    called = vars(optimizer)["step"]
    step = quick(plain_step, 1)
    step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    scheduler.step()  # warns, and so fails, had the optimizer not been seen to step
    assert vars(optimizer)["step"] is called
    assert type(optimizer) is torch.optim.AdamW
