"""The proof of programs that compute things once per window finds what a wrong pass would leave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.fx import Node

import gradsync_fx.passes
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.program import Kind
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.planning.plan import Plan
from gradsync_fx.runtime.captured_step import CapturedStep
from tests.scenarios import once


_aten = torch.ops.aten
pytestmark = pytest.mark.captured


def captured(kind: str) -> CapturedStep:
    run = once.Trained(kind)

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = run.loss(x, y)
        loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()
        return loss

    options = Options.of({"gradient_accumulation_steps": 3, "backend": "aot_eager"})
    step = OptimizedStep(train_step, options, simulated=1)
    with once.all_of_it():
        step.capture(*once.batch(0))
        (found,) = step._executor.catalogue.captures
        assert found.programs.kept.held
    return found


def build(kind: str, closing: frozenset[int]) -> None:
    made = captured(kind)
    with once.all_of_it():
        made.programs.build(closing)
        made.programs.build_held()


def broken(
    monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[[Draft, Plan], None]
) -> None:
    """After a pass of one of the lists."""
    for passes in ("MICRO_STEP", "PROLOGUE", "FOLD"):
        found: list[Any] = []
        for one in getattr(gradsync_fx.passes, passes):
            found += [one, fault] if one.__name__ == name else [one]
        monkeypatch.setattr(gradsync_fx.passes, passes, found)


def first(draft: Draft, target: Any) -> Node:
    return draft.graph.find_nodes(op="call_function", target=target)[0]


@pytest.mark.parametrize("kind", once.KINDS)
def test_right_programs_are_proved(kind: str) -> None:
    build(kind, frozenset())
    build(kind, frozenset({0}))


def test_another_value_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(draft: Draft, plan: Plan) -> None:
        held = [
            n
            for n, slot in zip(draft.placeholders(), draft.slots, strict=True)
            if slot.kind is Kind.INVARIANT
        ]
        if not held:  # of the program beside which it is compared
            return
        reader = next(iter(held[0].users))
        with draft.after(held[0]):
            wrong = draft.call(_aten.neg.default, held[0])
        reader.replace_input_with(held[0], wrong)

    broken(monkeypatch, "read_invariants", fault)
    with pytest.raises(VerificationError, match="without held values"):
        build("quantised", frozenset())


def test_a_held_value_that_is_not_written_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(draft: Draft, plan: Plan) -> None:
        draft.graph.erase_node(first(draft, _aten.copy_.default))

    broken(monkeypatch, "hold_values", fault)
    with pytest.raises(VerificationError, match="held values not written: 1"):
        build("quantised", frozenset())


def test_work_that_is_not_what_was_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(draft: Draft, plan: Plan) -> None:
        added = first(draft, _aten.add.Tensor)
        value = added.args[1]
        assert isinstance(value, Node)
        with draft.graph.inserting_before(added):
            twice = draft.call(_aten.mul.Tensor, value, 2.0)
        added.update_arg(1, twice)

    broken(monkeypatch, "fold_sums", fault)
    with pytest.raises(VerificationError, match="what a call would have added"):
        build("weight norm", frozenset())


def test_a_sum_that_is_left_as_it_is_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(draft: Draft, plan: Plan) -> None:
        last = draft.graph.find_nodes(op="call_function", target=_aten.copy_.default)[-1]
        draft.graph.erase_node(last)

    broken(monkeypatch, "fold_sums", fault)
    with pytest.raises(VerificationError, match="fold program"):
        build("weight norm", frozenset())


def test_a_sum_that_is_read_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def fault(draft: Draft, plan: Plan) -> None:
        if not plan.closing or not plan.invariants.deferred:
            return
        early = [
            n
            for n, slot in zip(draft.placeholders(), draft.slots, strict=True)
            if slot.name.startswith("sum for")
        ]
        (added,) = early[0].users
        value = added.args[1]
        assert isinstance(value, Node)
        with draft.after(value):
            more = draft.call(_aten.add.Tensor, early[0], value)
        added.update_arg(1, more)

    broken(monkeypatch, "work_on_sums", fault)
    with pytest.raises(VerificationError, match="read other than by one sum"):
        build("weight norm", frozenset({0}))
