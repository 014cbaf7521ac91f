"""Names of a step's tensors are the same in every branch, on every rank, and in the next run."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.capture.names import named_tensors
from gradsync_fx.capture.trace_state import Observed
from tests.optimizers import sgd
from tests.scenarios import branching
from tests.scenarios.branching import inputs, pair, step_of
from tests.workers import Ranks


def windows(order: Sequence[str], **options: Any) -> tuple[nn.Module, nn.Module, Any]:
    """Two models after windows of two calls, each of which begins with another one of them."""
    first, second = pair()
    run = gradsync_fx.optimize(
        step_of(first, second), gradient_accumulation_steps=2, backend="aot_eager", **options
    )
    for branch, x in zip(order, inputs(len(order)), strict=True):
        run(branch, x)
    return first, second, run


def plain(order: Sequence[str]) -> tuple[nn.Module, nn.Module]:
    """The same in plain PyTorch: the mean of both terms, then one update."""
    first, second = pair()
    update = sgd(nn.ModuleList([first, second]))
    for number, (branch, x) in enumerate(zip(order, inputs(len(order)), strict=True), 1):
        ahead, behind = (first, second) if branch == "first" else (second, first)
        (behind(ahead(x)).pow(2).mean() / 2).backward()
        if number % 2 == 0:
            update.step()
            update.zero_grad()
    return first, second


@pytest.mark.parametrize("order", [("first", "second"), ("second", "first")])
def test_branches_that_meet_models_in_another_order(order: Sequence[str]) -> None:
    ours = windows([*order, *order])
    theirs = plain([*order, *order])
    for mine, other in zip(ours[:2], theirs, strict=True):
        for (name, a), b in zip(mine.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(a, b, msg=name)
    sums = ours[2].gradients()
    shapes = {name: tuple(t.shape) for name, t in sums.items()}
    assert len(shapes) == 4, shapes


def test_a_window_saved_in_one_branch_goes_on_in_the_other() -> None:
    saved = windows(["first"])
    first, second = copy.deepcopy(saved[:2])
    run = gradsync_fx.optimize(
        step_of(first, second), gradient_accumulation_steps=2, backend="aot_eager"
    )
    run.load_state_dict(saved[2].state_dict())
    run("second", inputs(2)[1])
    through = windows(["first", "second"])
    for mine, other in zip((first, second), through[:2], strict=True):
        for a, b in zip(mine.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
    saved[2].discard()


@pytest.mark.gloo
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_ranks_that_begin_with_different_branches(ranks: Ranks, backend: str) -> None:
    everyone = ranks(branching.begin_apart, backend)
    assert everyone[0].keys() == everyone[1].keys()
    for name, tensor in everyone[0].items():
        assert torch.equal(tensor, everyone[1][name]), name
    expected = branching.expected()
    for name, tensor in everyone[0].items():
        torch.testing.assert_close(tensor, expected[name], msg=name)


@pytest.mark.gloo
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_batch_statistics_of_models_that_one_branch_calls(
    ranks: Ranks, backend: str, wrapped: bool
) -> None:
    everyone = ranks(branching.normed, backend, wrapped)
    for name, tensor in everyone[0].items():
        assert torch.equal(tensor, everyone[1][name]), name
    for name, tensor in (branching.statistics() | branching.trained()).items():
        torch.testing.assert_close(everyone[0][name], tensor, msg=name)


def modules(count: int) -> list[nn.Module]:
    return [nn.Linear(1, 1) for _ in range(count)]


def test_every_tensor_has_a_name_of_its_own() -> None:
    a, b, c, d = modules(4)
    seen = Observed(modules=[("x", c), ("x", b), ("x", d), ("", a)], within_reach=[("m", a)])
    parameters, _ = named_tensors(seen)
    assert list(parameters) == [
        *("weight", "bias", "x.weight", "x.bias"),
        *("x.weight (2)", "x.bias (2)", "x.weight (3)", "x.bias (3)"),
    ]
    assert [id(t) for t in parameters.values()] == [
        id(t) for m in (a, c, b, d) for t in m.parameters()
    ]


def test_what_is_in_reach_and_was_not_met_takes_its_name_and_no_part() -> None:
    a, b = modules(2)
    parameters, _ = named_tensors(Observed(modules=[("b", b)], within_reach=[("a", a), ("b", b)]))
    assert list(parameters) == ["b.weight", "b.bias"]


def test_a_trained_model_is_named_ahead_of_one_that_is_only_read() -> None:
    teacher, student = modules(2)
    optimizer = sgd(student)

    def step(x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = teacher(x)
        loss: Tensor = (student(x) - wanted).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run: Callable[..., Any] = gradsync_fx.optimize(
        step, gradient_accumulation_steps=2, backend="aot_eager"
    )
    run(torch.ones(2, 1))
    assert sorted(run.gradients()) == ["bias", "weight"]  # type: ignore[attr-defined]
    run(torch.ones(2, 1))
