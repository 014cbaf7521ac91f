"""Updates that a trace does not see wholly: the optimizer's own step runs as it is, once for each update."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import drive, plain_step, quick
from tests.models import mlp
from tests.own_optimizers import OPAQUE, Counts, Lookahead, Make, Own, momentum
from tests.reference import accumulation, assert_same, mse, regression, twins
from tests.refusals import refused


def pair() -> tuple[nn.Module, nn.Module]:
    """A model and its copy; the last weight has an attribute."""
    ours, eager = twins(mlp())
    for model in (ours, eager):
        model[2].weight.lr_scale = 0.1  # type: ignore[index, union-attr]
    return ours, eager


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", OPAQUE)
def test_each_is_right_and_says_why(name: str, k: int) -> None:
    ours, eager = pair()
    optimizer, reference = OPAQUE[name](ours), OPAQUE[name](eager)
    data = regression(5, k)
    step = quick(plain_step, k)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="runs as it is") as told:
        mine = drive(step, ours, optimizer, data)
    assert ["runs as it is" in str(t.message) for t in told].count(True) == 1
    assert_same(mine, accumulation(eager, reference, data), atol=1e-6)
    assert step.compile_count == (1 if k == 1 else 2)
    assert "runs as it is" in "".join(step.report().warnings)


@pytest.mark.parametrize("name", OPAQUE)
def test_each_is_right_in_a_step_that_runs_eagerly(name: str) -> None:
    def picky(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = plain_step(model, optimizer, x, y)
        if loss.item() > 1e9:  # what no trace can follow
            raise OverflowError
        return loss

    ours, eager = pair()
    optimizer, reference = OPAQUE[name](ours), OPAQUE[name](eager)
    data = [*regression(3, 2), *regression(1, 1, seed=7)]
    step = quick(picky, 2, on_unsupported="eager")
    first, *rest = [batch for window in data for batch in window]
    with pytest.warns(gradsync_fx.GradSyncWarning, match="the step runs eagerly"):
        step(ours, optimizer, *first)
    for batch in rest:
        step(ours, optimizer, *batch)
    step.flush()
    accumulation(eager, reference, data)
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)


def two_updates(
    nets: nn.ModuleDict, one: Optimizer, other: Optimizer, z: Tensor, x: Tensor
) -> tuple[Tensor, ...]:
    """A GAN's step with all that may stand after an update: clipped weights, an average, norms, and a second half."""
    fake = nets["g"](z)
    loss = F.softplus(-nets["d"](x)).mean() + F.softplus(nets["d"](fake.detach())).mean()
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(nets["d"].parameters(), 0.5)
    before = nets["d"][0].weight.detach().clone()  # type: ignore[index]
    one.step()
    with torch.no_grad():
        for p in nets["d"].parameters():
            p.clamp_(-0.3, 0.3)
        nets["average"].weight.lerp_(nets["d"][0].weight, 0.1)  # type: ignore[index, operator]
    moved = (nets["d"][0].weight.detach() - before).norm()  # type: ignore[index]
    one.zero_grad()
    other.zero_grad()
    loss_g = F.softplus(-nets["d"](fake)).mean()
    loss_g.backward()
    other.step()
    other.zero_grad()
    one.zero_grad()
    return loss.detach(), loss_g.detach(), norm, moved


def gan() -> nn.ModuleDict:
    nets = nn.ModuleDict(
        {
            "g": nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.BatchNorm1d(8), nn.Linear(8, 3)),
            "d": nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 1)),
            "average": nn.Linear(3, 8),
        }
    )
    nets["average"].requires_grad_(False)
    return nets


def sgd(net: nn.Module) -> Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.5)


def counts(net: nn.Module) -> Optimizer:
    return Counts(net.parameters(), lr=0.2)


@pytest.mark.parametrize(("one", "other"), [(counts, sgd), (sgd, counts), (counts, counts)])
def test_what_reads_an_updated_parameter_runs_behind_the_update(one: Make, other: Make) -> None:
    ours, eager = gan(), None
    eager = copy.deepcopy(ours)
    mine, theirs = ([one(n["d"]), other(n["g"])] for n in (ours, eager))
    step = quick(two_updates, 1)
    for _ in range(4):
        batch = torch.randn(6, 4), torch.randn(6, 3)
        state = torch.get_rng_state()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = step(ours, *mine, *batch)
        torch.set_rng_state(state)
        want = two_updates(eager, theirs[0], theirs[1], *batch)
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=1e-5)


def test_inductor_cuts_the_same_program() -> None:
    ours = gan()
    ours["d"][1].p = 0.0  # type: ignore[index, union-attr]
    eager = copy.deepcopy(ours)
    mine, theirs = ([counts(n["d"]), sgd(n["g"])] for n in (ours, eager))
    step = quick(two_updates, 1, backend="inductor")
    for _ in range(3):
        batch = torch.randn(6, 4), torch.randn(6, 3)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            got = step(ours, *mine, *batch)
        want = two_updates(eager, theirs[0], theirs[1], *batch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-5, rtol=1e-5)


@pytest.mark.filterwarnings("ignore:Lookahead.step runs")
def test_a_window_that_is_flushed() -> None:
    ours, eager = pair()
    optimizer, reference = Lookahead(momentum(ours)), Lookahead(momentum(eager))
    windows = [*regression(2, 3), *regression(1, 2, seed=7)]
    step = quick(plain_step, 3)
    for batch in (batch for window in windows for batch in window):
        step(ours, optimizer, *batch)
    assert step.pending == 2
    step.flush()
    accumulation(eager, reference, windows)
    assert optimizer.n == reference.n == 3
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Counts.step runs")
def test_windows_that_are_not_finite_make_no_update() -> None:
    ours, eager = pair()
    optimizer, reference = Counts(ours.parameters()), Counts(eager.parameters())
    good = regression(2, 2)
    bad = [(x * torch.nan, y) for x, y in good[0]]
    step = quick(plain_step, 2, skip_nonfinite=True)
    for window in (good[0], bad, good[1]):
        for batch in window:
            if window is bad:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    step(ours, optimizer, *batch)
            else:
                step(ours, optimizer, *batch)
    accumulation(eager, reference, good)
    assert optimizer.t == 2
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Counts.step runs")
def test_each_optimizer_has_its_own_window() -> None:
    def both(model: nn.Module, one: Optimizer, other: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        one.step()
        other.step()
        one.zero_grad()
        other.zero_grad()
        return loss

    ours, eager = pair()
    mine, theirs = ([Counts(m[0].parameters()), sgd(m[2])] for m in (ours, eager))  # type: ignore[index]
    step = quick(both, {mine[0]: 1, mine[1]: 2})
    for i, (x, y) in enumerate(regression(6, 1)[j][0] for j in range(6)):
        step(ours, *mine, x, y)
        mse(eager, x, y).backward()
        theirs[0].step()
        theirs[0].zero_grad()
        if i % 2:
            for p in eager[2].parameters():  # type: ignore[index]
                p.grad.div_(2)
            theirs[1].step()
            theirs[1].zero_grad()
    torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore:Own.step runs")
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_arguments_of_the_update(backend: str) -> None:
    def step_with(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step(factor=0.25)
        optimizer.zero_grad()
        return loss

    ours, eager = pair()
    optimizer, reference = Own(ours.parameters()), Own(eager.parameters(), lr=0.025)
    data = regression(2, 2)
    mine = drive(quick(step_with, 2, backend=backend), ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-5)


def test_an_argument_that_changes_is_refused_by_name() -> None:
    def step_with(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step(factor=loss.detach())
        optimizer.zero_grad()

    model = mlp()
    (batch,) = regression(1, 1)[0]
    refused(
        gradsync_fx.CaptureError,
        "Own.step",
        quick(step_with, 2),
        model,
        Own(model.parameters()),
        *batch,
    )


@pytest.mark.parametrize("how", ["error", "eager"])
@pytest.mark.parametrize("k", [1, 2])
def test_closures_are_refused_by_name(how: str, k: int) -> None:
    def step_with(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    for cls in (torch.optim.LBFGS, Own):
        model = mlp()
        (batch,) = regression(1, 1)[0]
        step = quick(step_with, k, on_unsupported=how)
        warned = pytest.warns(gradsync_fx.GradSyncWarning) if how == "eager" else nullcontext()
        with warned, pytest.raises(gradsync_fx.CaptureError, match=f"{cls.__name__}.step"):
            step(model, cls(model.parameters()), *batch)


@pytest.mark.filterwarnings("ignore:.* runs as it is")
def test_a_result_of_the_update_that_is_used_is_refused_by_name() -> None:
    class Tells(Own):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            return {"updates": 1}

    def returns(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        mse(model, x, y).backward()
        told = optimizer.step()
        optimizer.zero_grad()
        return told

    (batch,) = regression(1, 1)[0]
    model = mlp()
    step = quick(plain_step, 1)
    step(model, Tells(model.parameters()), *batch)  # not used: nothing to refuse
    model = mlp()
    refused(
        gradsync_fx.UpdateError,
        "Tells",
        quick(returns, 1),
        model,
        Tells(model.parameters()),
        *batch,
    )


@pytest.mark.filterwarnings("ignore:.* runs as it is")
def test_the_optimizers_state_may_be_dropped_at_any_time() -> None:
    """Compiled and opaque alike: as eager, which begins anew."""
    makes: dict[str, Make] = {
        "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
        "momentum": momentum,
        "lookahead": lambda m: Lookahead(momentum(m)),
    }
    for make in makes.values():
        ours, eager = pair()
        optimizer, reference = make(ours), make(eager)
        step = quick(plain_step, 1)
        for i, window in enumerate(regression(6, 1)):
            for o, m in ((optimizer, ours), (reference, eager)):
                if i == 2:
                    o.state.clear()
                elif i == 4:
                    o.state.pop(m[0].weight, None)  # type: ignore[index, call-overload]
            step(ours, optimizer, *window[0])
            plain_step(eager, reference, *window[0])
            torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=0)


def test_explain_tells_without_a_run() -> None:
    model = mlp()
    batch = regression(1, 1)[0][0]
    report = gradsync_fx.explain(
        plain_step, model, Counts(model.parameters()), *batch, world_size=2
    )
    assert any("it sets its attribute 't'" in text for text in report.warnings)
