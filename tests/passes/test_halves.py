"""Programs cut in two: what stands in which half, what goes from one to the other, and that a fault is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.memory import base_of
from gradsync_fx.ir.ops import WAIT, is_collective
from gradsync_fx.ir.program import Kind, writes
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.passes import FOR_INDUCTOR, rewrite
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.rewritten import Halves, Rewritten
from tests.drive import plain_step, step_of
from tests.passes.test_overlap import clip
from tests.reference import mse


pytestmark = pytest.mark.captured
CLIPPED = step_of(mse, clip)


def cut(
    step: Callable[..., Any] = CLIPPED, *, tail: bool = False, ranks: int = 2, **options: Any
) -> Rewritten:
    """The boundary of four layers, each a bucket, as Inductor is handed it."""
    model = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given = {"gradient_accumulation_steps": 2, "backend": "aot_eager", "bucket_cap_mb": 1e-3}
    planned = OptimizedStep(step, Options.of({**given, **options}), simulated=ranks)
    planned.capture(model, optimizer, torch.randn(4, 128), torch.randn(4, 128))
    (captured,) = planned._executor.catalogue.captures
    program = captured.programs.build(frozenset({0}), tail=tail)
    without = options.get("without", ())
    return rewrite(program, captured.facts.capture.fake_mode, Journal(), FOR_INDUCTOR, without)


def halves_of(rewritten: Rewritten) -> tuple[Halves, GraphModule, GraphModule]:
    halves = rewritten.halves
    assert halves is not None
    assert halves.second is not None
    return halves, halves.first, halves.second


def calls(module: GraphModule, *targets: Any) -> list[Node]:
    return [n for n in module.graph.nodes if n.target in targets]


def written_kinds(rewritten: Rewritten, module: GraphModule, taken: list[int | None]) -> set[Kind]:
    """What a half writes, by kind. taken: by position of its inputs the position in the whole."""
    holders = list(module.graph.find_nodes(op="placeholder"))
    found = [taken[holders.index(w.args[0])] for w in writes(module)]  # type: ignore[arg-type]
    return {rewritten.slots[i].kind for i in found if i is not None}


@pytest.mark.parametrize("tail", [False, True])
@pytest.mark.parametrize("without", [(), ("updates",), ("in_place",), ("in_place", "updates")])
def test_reductions_start_in_the_first_half_and_are_waited_for_in_the_second(
    without: tuple[str, ...], tail: bool
) -> None:
    rewritten = cut(without=without, tail=tail)
    halves, first, second = halves_of(rewritten)
    started = [n for n in first.graph.nodes if is_collective(n) or n.target is START_SUMS]
    assert len(started) == 4
    assert not calls(first, WAIT, WAIT_SUMS)
    assert len(calls(second, WAIT, WAIT_SUMS)) == 4
    assert not [n for n in second.graph.nodes if is_collective(n) or n.target is START_SUMS]
    # State and parameters are of the update; the sums, where they lie, of the micro-step.
    assert written_kinds(rewritten, first, list(halves.first_inputs)) <= {Kind.ACCUMULATOR}
    if "updates" in without:
        taken = [i if kind == "input" else None for kind, i in halves.second_inputs]
        assert written_kinds(rewritten, second, taken) == {
            Kind.PARAMETER,
            Kind.STATE,
            Kind.ACCUMULATOR,
        }


def test_the_update_of_a_tail_is_that_of_a_boundary() -> None:
    """The same text, over the same inputs in the same order."""
    (one, _, update), (other, _, of_tail) = (halves_of(cut(tail=tail)) for tail in (False, True))
    assert update.code == of_tail.code
    assert len(one.second_inputs) == len(other.second_inputs)


def test_what_a_collective_sends_from_is_kept_until_its_wait() -> None:
    """A compiler would put other values where it lies."""
    halves, first, _ = halves_of(cut(without=("in_place",)))
    (out,) = first.graph.find_nodes(op="output")
    for started in filter(is_collective, first.graph.nodes):
        assert started in out.args[0]
        assert base_of(started.args[0], [torch.ops.aten.reshape.default]) in out.args[0]
    assert len(halves.started) == 4


def test_a_step_that_reads_its_update_gives_what_it_reads_in_the_second_half() -> None:
    def step(model: nn.Module, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        loss = ((model(x) - y) ** 2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    halves, _, _ = halves_of(cut(step))
    assert [kind for kind, _ in halves.results[:2]] == ["first", "second"]


def test_one_rank_and_a_micro_step_stay_whole() -> None:
    assert cut(plain_step, ranks=1).halves is None


def drop_the_first_write(graph: torch.fx.Graph) -> None:
    graph.erase_node(graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)[0])


def wait_twice(graph: torch.fx.Graph) -> None:
    (wait, *_) = graph.find_nodes(op="call_function", target=WAIT_SUMS)
    wait.append(graph.node_copy(wait))


def read_before_the_wait(graph: torch.fx.Graph) -> None:
    (out,) = graph.find_nodes(op="output")
    waits = graph.find_nodes(op="call_function", target=WAIT_SUMS)
    out.prepend(waits[0])


@pytest.mark.parametrize("fault", [drop_the_first_write, wait_twice, read_before_the_wait])
def test_a_fault_in_a_half_is_found(fault: Callable[[torch.fx.Graph], None]) -> None:
    rewritten = cut(without=("updates",))
    _, _, second = halves_of(rewritten)
    check_lowered(rewritten)
    fault(second.graph)
    with pytest.raises(VerificationError, match="boundary program, in lowering"):
        check_lowered(rewritten)
