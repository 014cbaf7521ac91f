"""The runner of passes: what it writes into the journal, and faults of a pass that it notices at the end of a list."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import gradsync_fx
import gradsync_fx.passes
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.program import Program
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import OPTIMIZATIONS, Options
from gradsync_fx.passes import ALWAYS, FOR_INDUCTOR, FOR_OTHERS, MICRO_STEP, TAIL, rewrite
from gradsync_fx.passes.rewritten import Rewritten
from gradsync_fx.planning.plan import Plan
from gradsync_fx.runtime.captured_step import CapturedStep
from tests.drive import plain_step
from tests.models import mlp
from tests.reference import regression


_aten = torch.ops.aten


def planned() -> CapturedStep:
    """For two ranks that are not there."""
    model = mlp()
    step = OptimizedStep(plain_step, Options.of({"gradient_accumulation_steps": 2}), simulated=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step.capture(model, optimizer, *regression(1, 1)[0][0])
    (captured,) = step._executor.catalogue.captures
    return captured


@pytest.fixture(scope="module")
def boundary() -> tuple[Program, Any]:
    captured = planned()
    return captured.programs.build(frozenset({0})), captured.facts.capture.fake_mode


def names(passes: list[Any]) -> list[str]:
    return [one.__name__ for _, one in passes]


def test_each_optimization_is_one_that_can_be_disabled() -> None:
    assert {name for name, _ in FOR_INDUCTOR + FOR_OTHERS} - {ALWAYS} <= set(OPTIMIZATIONS)


def test_the_journal_holds_the_passes_in_lowering(boundary: tuple[Program, Any]) -> None:
    """Each with the nodes before and after it, those of kernels that were cut out with them."""
    journal = Journal()
    rewritten = rewrite(*boundary, journal, FOR_INDUCTOR)
    assert [entry.name for entry in journal.entries] == names(FOR_INDUCTOR)
    assert {entry.program for entry in journal.entries} == {"boundary"}
    program, _ = boundary
    assert journal.entries[0].nodes_before == len(program.module.graph.nodes)
    for entry, following in zip(journal.entries, journal.entries[1:], strict=False):
        assert entry.nodes_after == following.nodes_before
    assert journal.entries[-1].nodes_after == sum(len(m.graph.nodes) for m in rewritten.modules())


@pytest.mark.inductor
def test_the_report_shows_the_passes_in_lowering() -> None:
    model = mlp()
    step = gradsync_fx.optimize(plain_step)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), *regression(1, 1)[0][0])
    shown = [entry.name for entry in step.report().passes]
    assert shown == [one.__name__ for one in MICRO_STEP] + names(FOR_INDUCTOR)
    assert '"numbers_as_tensors"' in step.report().to_json()
    assert "numbers_as_tensors" in step.report().to_html()


def test_a_disabled_optimization_is_left_out(boundary: tuple[Program, Any]) -> None:
    journal = Journal()
    rewritten = rewrite(*boundary, journal, FOR_INDUCTOR, without=("overlap", "updates"))
    left = [entry.name for entry in journal.entries]
    left_out = ("wait_late", "cut_updates", "join_updates", "spread_waits")
    assert left == [n for n in names(FOR_INDUCTOR) if n not in left_out]
    assert rewritten.settings == {}
    assert rewritten.cut.calls == []


def drops_a_write(rewritten: Rewritten) -> None:
    graph = rewritten.main.graph
    *_, last = graph.find_nodes(op="call_function", target=_aten.copy_.default)
    graph.erase_node(last)


def reads_before_it_is_made(rewritten: Rewritten) -> None:
    graph = rewritten.main.graph
    first, *_ = graph.find_nodes(op="call_function", target=_aten.mm.default)
    next(iter(first.users)).append(first)


def reads_what_is_gone(rewritten: Rewritten) -> None:
    graph = rewritten.main.graph
    first, *_ = graph.find_nodes(op="call_function", target=_aten.mm.default)
    readers = list(first.users)
    first.users.clear()
    graph.erase_node(first)
    assert readers


def makes_a_value_without_a_form(rewritten: Rewritten) -> None:
    graph = rewritten.main.graph
    first, *_ = graph.find_nodes(op="call_function", target=_aten.mm.default)
    with graph.inserting_after(first):
        made = graph.call_function(_aten.clone.default, (first,))
    first.replace_all_uses_with(made, delete_user_cb=lambda user: user is not made)


@pytest.mark.parametrize("at", [0, len(FOR_INDUCTOR)])
@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (drops_a_write, "ends as"),
        (reads_before_it_is_made, "before it has been defined"),
        (reads_what_is_gone, "defined"),
        (makes_a_value_without_a_form, "has no fake value"),
    ],
)
def test_a_fault_of_a_pass_in_lowering(
    fault: Callable[[Rewritten], None], seen: str, at: int, boundary: tuple[Program, Any]
) -> None:
    """It is named, also where it is not the last one, and where a later one cannot work on what it left."""
    passes = list(FOR_INDUCTOR)
    passes.insert(at, (ALWAYS, fault))
    with pytest.raises(VerificationError, match=seen) as caught:
        rewrite(*boundary, Journal(), passes)
    assert f"after the pass {fault.__name__!r}" in caught.value.culprit


def test_a_fault_of_a_pass_before_lowering(monkeypatch: pytest.MonkeyPatch) -> None:
    def reads_what_comes_later(draft: Draft, plan: Plan) -> None:
        first, *_, last = draft.graph.find_nodes(op="call_function", target=_aten.mm.default)
        first.update_arg(0, last)

    monkeypatch.setattr(gradsync_fx.passes, "MICRO_STEP", [*MICRO_STEP, reads_what_comes_later])
    with pytest.raises(VerificationError, match="after the pass 'reads_what_comes_later'"):
        planned().programs.build(frozenset({0}))


def test_a_pass_stands_once_in_a_list() -> None:
    for found in (
        [p.__name__ for p in MICRO_STEP],
        [p.__name__ for p in TAIL],
        names(FOR_INDUCTOR),
        names(FOR_OTHERS),
    ):
        assert len(found) == len(set(found))
