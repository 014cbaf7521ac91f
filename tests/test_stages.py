"""Programs cut at opaque updates.

g -> clip -> [update] -> p' -> clamp -> copy_(p)    |    stage 1: gradients; the update; stage 2: p, clamp, copy_(p)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.program import Kind
from gradsync_fx.stages import Stages, cut, is_cut
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.own_optimizers import Counts
from tests.reference import mse, regression


def stages_of(step: Callable[..., Any]) -> Stages:
    model = mlp()
    run = quick(step, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning):
        run(model, Counts(model.parameters()), *regression(1, 1)[0][0])
    (captured,) = run._executor.captures
    return cut(next(p for p in captured.programs.values() if is_cut(p)))


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
