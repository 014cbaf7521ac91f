"""torch's reason for a failed trace becomes an error with the user's line, and a way out that works."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.capture.explained import explained
from gradsync_fx.errors import CaptureError, OptionError
from tests.drive import quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import assert_same_parameters, mse, regression, twins
from tests.refusals import refused


def test_an_error_of_ours_inside_torchs_is_it() -> None:
    ours, torchs = OptionError("it", seen="this"), RuntimeError("in torch's words")
    torchs.__cause__ = ours
    assert explained(torchs, test_an_error_of_ours_inside_torchs_is_it) is ours


def test_the_last_line_of_the_users() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        if loss > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    model, line = mlp(), step.__code__.co_firstlineno + 2
    args = (model, sgd(model), torch.ones(4, 8), torch.ones(4, 1))
    error = refused(gradsync_fx.CaptureError, f"test_explained.py:{line}", quick(step, 2), *args)
    assert 'on_unsupported="eager"' in error.fix


def nonzero(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return out[torch.nonzero(out > out.mean())[:, 0]].square().mean()


def boolean(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    out = model(x)
    return out[out > out.mean()].square().mean()


def connectionist(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    scores = torch.log_softmax(torch.stack([model(x), -model(x)], -1), -1)
    lengths = torch.tensor([scores.shape[0]])
    loss: Tensor = nn.CTCLoss()(
        scores, torch.ones(1, 2, dtype=torch.long), lengths, torch.tensor([2])
    )
    return loss


def branching(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    return loss * 2 if loss > 0.1 else loss


def written(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    loss = mse(model, x, y)
    return loss if repr(loss) else -loss


def check_against_eager(loss_of: Any, run: Any, ours: nn.Module, eager: nn.Module) -> None:
    """Three windows of two through `run`, compared with plain accumulation."""
    optimizer, reference = sgd(ours), sgd(eager)
    for window in regression(3, 2):
        for x, y in window:
            run(ours, optimizer, x, y)
            (loss_of(eager, x, y) / 2).backward()
        reference.step()
        reference.zero_grad()
    assert_same_parameters(ours, eager)


def step_with(loss_of: Any) -> Any:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("loss_of", [nonzero, boolean])
def test_shapes_that_depend_on_values_are_captured(loss_of: Any) -> None:
    check_against_eager(loss_of, quick(step_with(loss_of), 2), *twins(mlp()))


@pytest.mark.parametrize("loss_of", [connectionist, branching, written])
def test_the_way_out_works(loss_of: Any) -> None:
    """The advice, followed: the windows of plain accumulation."""
    step, other = step_with(loss_of), mlp()
    args = (other, sgd(other), torch.ones(4, 8), torch.ones(4, 1))
    error = refused(gradsync_fx.CaptureError, __file__, quick(step, 2), *args)
    assert 'on_unsupported="eager"' in error.fix
    assert "torch._dynamo" not in str(error)
    assert "fullgraph" not in str(error)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        check_against_eager(loss_of, quick(step, 2, on_unsupported="eager"), *twins(mlp()))


@dataclass
class Output:
    loss: torch.Tensor


@pytest.mark.captured
def test_an_object_with_an_attached_loss_is_named() -> None:
    """And the advice works."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def train(x: torch.Tensor) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def attached(x: torch.Tensor) -> Output:
        return Output(train(x))

    def detached(x: torch.Tensor) -> Output:
        return Output(train(x).detach())

    x = torch.ones(3, 2)
    refused(CaptureError, "what the step returns", quick(attached, 2), x)
    wanted = model(x).square().mean().detach()
    torch.testing.assert_close(quick(detached, 2)(x).loss, wanted)
