"""Programs cut at opaque updates.

g -> clip -> [update] -> p' -> clamp -> copy_(p)    |    stage 1: gradients; the update; stage 2: p, clamp, copy_(p)
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.ir.program import Kind
from gradsync_fx.passes.stages import Stages, cut_at_updates, is_cut
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.own_optimizers import Counts
from tests.reference import mse, regression


def stages_of(step: Callable[..., Any]) -> Stages:
    model = mlp()
    run = quick(step, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning):
        run(model, Counts(model.parameters()), *regression(1, 1)[0][0])
    (captured,) = run._executor.catalogue.captures
    return cut_at_updates(next(p for p in captured.programs.by_name.values() if is_cut(p)))


def test_nothing_is_left_to_do_behind_a_plain_update() -> None:
    first, last = stages_of(plain_step).stages
    assert first.update is not None
    assert len(first.gradients) == 4
    assert last.program is None
    assert not [k for k in first.inputs if isinstance(k, str)]


def clamped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    loss = mse(model, x, y)
    loss.backward()
    weight: Any = model[0].weight  # type: ignore[index]
    before = weight.detach().clone()
    optimizer.step()
    with torch.no_grad():
        weight.clamp_(-0.1, 0.1)
    optimizer.zero_grad()
    return loss.detach(), (weight.detach() - before).norm()


def test_the_report_tells_of_the_cut() -> None:
    model = mlp()
    run = quick(clamped, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning):
        run(model, Counts(model.parameters()), *regression(1, 1)[0][0])
    report = run.report()
    (entry,) = (e for e in report.passes if e.name == "cut_at_updates")
    assert entry.program == "boundary"
    assert min(entry.nodes_before, entry.nodes_after) > 0
    assert '"cut_at_updates"' in report.to_json()


def test_what_reads_the_parameter_as_it_was_gets_a_copy() -> None:
    first, last = stages_of(clamped).stages
    assert last.program is not None
    carried = [s for s in last.program.slots if s.kind is Kind.CARRIED]
    assert len(carried) == 1
    assert [s.name for s in last.program.slots if s.kind is Kind.PARAMETER] == ["0.weight"]
    assert first.program is not None
    clones = first.program.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.clone.default
    )
    assert clones


def test_sums_are_reset_ahead_of_the_update() -> None:
    first, _ = stages_of(plain_step).stages
    assert first.program is not None
    copies = first.program.module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    )
    assert len(copies) == 4


def test_the_program_itself_still_shows_the_update() -> None:
    model = mlp()
    step = quick(plain_step, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning):
        step(model, Counts(model.parameters()), *regression(1, 1)[0][0])
    assert "gradsync_fx.update" in step.programs["boundary"].code


def normed() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1)
    )


def begun(model: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    return loss.detach()


def second_loss(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = begun(model, x.view(-1, 8), y)
    optimizer.step()
    with torch.no_grad():
        after = mse(model, x, y)
    return loss, after, x.sum() * x.shape[0]


def gradient_kept(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = begun(model, x, y)
    optimizer.step()
    return loss, model[0].weight.grad.norm()


def changed_before(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = begun(model, x, y)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.9)
    optimizer.step()
    return loss, model[0].weight.detach().clone()


def half_way(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = begun(model, x, y)
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    with torch.no_grad():
        for p, q in zip(model.parameters(), before, strict=True):
            p.lerp_(q, 0.5)
    return loss, model[4].weight.detach().t()


def a_number(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = begun(model, x, y)
    value = loss.item()
    optimizer.step()
    with torch.no_grad():
        y.add_(model[4].bias.sum() * value)
    return loss, y


def drawn(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
    loss = begun(model, x + 0.1 * torch.randn_like(x), y)
    optimizer.step()
    return loss, torch.rand(3)


@pytest.mark.filterwarnings("ignore:Counts.step runs")
@pytest.mark.parametrize(
    "function", [second_loss, gradient_kept, changed_before, half_way, a_number, drawn]
)
def test_round_the_update_a_step_does_what_it_does_in_eager(function: Callable[..., Any]) -> None:
    """Sizes change from the third call on: what is carried over a cut may be dynamic."""

    def whole(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        results = function(model, optimizer, x, y)
        optimizer.zero_grad()
        return results

    ours = normed()
    eager = copy.deepcopy(ours)
    optimizer, reference = Counts(ours.parameters()), Counts(eager.parameters())
    step = quick(whole, 1)
    for size in (4, 4, 4, 4) if function is a_number else (4, 4, 6, 8):
        x, y = torch.randn(size, 8), torch.randn(size, 1)
        other, state = y.clone(), torch.get_rng_state()
        mine = step(ours, optimizer, x, y)
        torch.set_rng_state(state)
        theirs = whole(eager, reference, x, other)
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(ours.state_dict(), eager.state_dict(), atol=1e-6, rtol=1e-5)
