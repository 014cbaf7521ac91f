"""What a step raises in plain PyTorch, it raises when optimized: the same exception, at the same line."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.user_lines import OURS
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import accumulation, assert_same_parameters, mse, regression, twins
from tests.refusals import refused


SETTINGS = {"rate": 0.1}


class Spoiled(Exception):
    """With arguments of its own."""

    def __init__(self, rows: int, *, why: str) -> None:
        super().__init__(f"{rows} rows: {why}")
        self.rows = rows


def with_cause(m: Any, x: Tensor, y: Tensor) -> Tensor:
    try:
        return mse(m, x, y) * SETTINGS["scale"]
    except KeyError as missing:
        raise RuntimeError("no scale in the settings") from missing


def checked(m: Any, x: Tensor, y: Tensor) -> Tensor:
    if x.shape[0] != 3:
        raise AssertionError("three rows")
    return mse(m, x, y)


def spoiled(m: Any, x: Tensor, y: Tensor) -> Tensor:
    raise Spoiled(x.shape[0], why="spoiled")


def not_assigned(m: Any, x: Tensor, y: Tensor) -> Tensor:
    if x.shape[0] == 3:
        loss = mse(m, x, y)
    return loss


def without_gradient(m: Any, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return mse(m, x, y)


LOSSES: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "a wrong shape": lambda m, x, y: mse(m, x.view(3, 3), y),
    "shapes that do not fit": lambda m, x, y: (m(x) @ torch.ones(3, 3)).sum(),
    "a concatenation": lambda m, x, y: torch.cat([m(x), torch.ones(3, 3)], 1).sum(),
    "a misspelt name": lambda m, x, y: mse(modell, x, y),  # type: ignore[name-defined]  # noqa: F821
    "a misspelt attribute": lambda m, x, y: mse(m.modell, x, y),
    "a misspelt method of a tensor": lambda m, x, y: m(x).meen(),
    "a misspelt keyword": lambda m, x, y: F.mse_loss(m(x), y, reductoin="mean"),  # type: ignore[call-arg]
    "too many arguments": lambda m, x, y: mse(m, x, y) + m(x, x),
    "a key": lambda m, x, y: mse(m, x, y) * SETTINGS["scale"],
    "an index": lambda m, x, y: mse(m, x, y) * [1.0][x.shape[0]],
    "a type": lambda m, x, y: mse(m, x, y) + "1",
    "a dtype": lambda m, x, y: mse(m, x.long(), y),
    "a value that is not there": lambda m, x, y: SETTINGS.get("loss")(m(x), y),  # type: ignore[misc]
    "a division": lambda m, x, y: mse(m, x, y) * (1 / (x.shape[0] - 4)),
    "an assertion": checked,
    "an exception of the user's": spoiled,
    "one raised from another": with_cause,
    "a name without a value": not_assigned,
    "a detached loss": lambda m, x, y: mse(m, x, y).detach(),
    "a loss without gradients": without_gradient,
    "a loss of many numbers": lambda m, x, y: m(x),
    "a label out of range": lambda m, x, y: F.nll_loss(m(x), torch.full((4,), 7)),
}


def step_of(loss_of: Callable[[Any, Tensor, Tensor], Any]) -> Any:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def raised(call: Callable[..., Any], *args: Any) -> Exception:
    with pytest.raises(Exception) as caught:  # noqa: PT011
        call(*args)
    assert isinstance(caught.value, Exception)
    return caught.value


def places(error: Exception) -> list[tuple[str, int | None]]:
    """Of this file's own frames, below the one that called the step."""
    frames = traceback.extract_tb(error.__traceback__)
    return [(f.filename, f.lineno) for f in frames if f.filename == __file__][2:]


@pytest.mark.parametrize("mode", ["error", "eager"])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_what_plain_pytorch_raises(name: str, mode: str) -> None:
    step, model = step_of(LOSSES[name]), mlp()
    batch = (torch.ones(4, 8), torch.ones(4, 1))
    wanted = raised(step, model, sgd(model), *batch)
    found = raised(quick(step, 2, on_unsupported=mode), model, sgd(model), *batch)
    assert type(found) is type(wanted)
    assert str(found) == str(wanted)
    assert vars(found) == vars(wanted)
    assert type(found.__cause__) is type(wanted.__cause__)
    lines = traceback.format_exception(found)
    assert len(lines) <= len(traceback.format_exception(wanted)) + 2, "".join(lines)
    assert places(found)[-1:] == places(wanted)[-1:]
    files = [f.filename for f in traceback.extract_tb(found.__traceback__)]
    assert not [file for file in files if file.startswith(OURS)]


def test_prepare_and_explain_raise_it_too() -> None:
    model = mlp()
    args = (model, sgd(model), torch.ones(4, 8), torch.ones(4, 1))
    step = step_of(LOSSES["a key"])
    for call in (quick(step, 2).prepare, lambda *a: gradsync_fx.explain(step, *a)):
        assert isinstance(raised(call, *args), KeyError)
    with torch.device("meta"):
        meta = mlp()
        args = (meta, sgd(meta), torch.ones(4, 8), torch.ones(4, 1))
    assert isinstance(raised(gradsync_fx.explain, step, *args), KeyError)


def test_a_batch_that_raises_is_no_micro_step() -> None:
    """The loop goes on as plain PyTorch does: weights, statistics and random numbers are those of the other batches."""
    torch.manual_seed(0)
    ours, eager = twins(nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)))
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(plain_step, 2)
    data = regression(3, 2)
    for window in data:
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            step(ours, optimizer, torch.ones(4, 3), torch.ones(4, 1))
        for x, y in window:
            step(ours, optimizer, x, y)
            with pytest.raises(RuntimeError, match="mat1 and mat2"):
                step(ours, optimizer, torch.ones(4, 3), torch.ones(4, 1))
    assert step.optimizer_step == 3
    accumulation(eager, reference, data)
    assert_same_parameters(ours, eager)
    torch.testing.assert_close(dict(ours.named_buffers()), dict(eager.named_buffers()))


def test_a_step_that_fails_only_in_a_trace_leaves_nothing_behind() -> None:
    """Run once to see whether it raises by itself, it does not: all is as it was."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x + torch.rand(4, 8), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5)
        return loss if repr(loss) else -loss

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    before = {n: p.clone() for n, p in model.named_parameters()}
    torch.manual_seed(3)
    refused(
        gradsync_fx.CaptureError,
        "test_own_errors.py",
        quick(step, 2),
        model,
        optimizer,
        torch.ones(4, 8),
        torch.ones(4, 1),
    )
    after = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(after, torch.rand(3))
    assert not optimizer.state
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_no_backward_is_said_to_be_none() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        optimizer.step()
        return loss.detach()

    model = mlp()
    args = (model, sgd(model), torch.ones(4, 8), torch.ones(4, 1))
    error = refused(gradsync_fx.NoBackwardError, "the step", quick(step, 2), *args)
    assert "never calls backward" in error.seen
    assert not isinstance(error, gradsync_fx.NoGradientError)


def test_a_backward_that_reaches_no_parameter() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        F.mse_loss(x.mean(1, keepdim=True), y).backward()
        optimizer.step()

    model = mlp()
    x = torch.ones(4, 8, requires_grad=True)
    error = refused(
        gradsync_fx.NoGradientError,
        "the step",
        quick(step, 2),
        model,
        sgd(model),
        x,
        torch.ones(4, 1),
    )
    assert "reaches no parameter" in error.seen


def test_a_frozen_model_is_torchs_own_error() -> None:
    model = mlp()
    optimizer = sgd(model)
    model.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad") as caught:
        quick(plain_step, 2)(model, optimizer, torch.ones(4, 8), torch.ones(4, 1))
    assert not isinstance(caught.value, gradsync_fx.GradSyncError)


def test_a_step_that_runs_on_eagerly_runs_once_for_each_call() -> None:
    """A trace that failed may have failed because the step raises: then the eager run is what finds out."""
    counted: list[int] = []

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        counted.append(len(counted))
        assert bool(x.mean() > -100)
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = mlp()
    optimizer, run = sgd(model), quick(step, 2, on_unsupported="eager")
    with pytest.warns(match="the step runs eagerly"):
        run(model, optimizer, *regression(1, 1)[0][0])
    run(model, optimizer, *regression(1, 1)[0][0])
    assert counted == [0, 1]
    with pytest.raises(AssertionError):
        run(model, optimizer, torch.full((4, 8), -1000.0), torch.ones(4, 1))
