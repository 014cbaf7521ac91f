"""Gathers that end in the next call: where parameters arrive, what is left for later, and that a fault is found."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx import Node

from gradsync_fx.comm.arrivals import ARRIVE
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import WAIT
from gradsync_fx.ir.program import Kind
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.passes import FOR_INDUCTOR, rewrite
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.rewritten import Halves, Rewritten
from gradsync_fx.passes.scatter import ALL_GATHER
from tests.drive import plain_step


pytestmark = pytest.mark.captured


def lowered(closing: frozenset[int], *, hides: bool = True) -> Rewritten:
    """Of four layers, each a bucket, whose updates are shared out between two ranks."""
    model = torch.nn.Sequential(*(torch.nn.Linear(128, 128, bias=False) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    options = Options.of(
        {
            "gradient_accumulation_steps": 2,
            "bucket_cap_mb": 1e-3,
            "shard_optimizer": True,
            "overlap_param_gather": hides,
            "backend": "aot_eager",
        }
    )
    planned = OptimizedStep(plain_step, options, simulated=2)
    planned.capture(model, optimizer, torch.randn(4, 128), torch.randn(4, 128))
    (captured,) = planned._executor.catalogue.captures
    program = captured.programs.build(closing)
    return rewrite(program, captured.facts.capture.fake_mode, Journal(), FOR_INDUCTOR)


def boundary() -> tuple[Rewritten, Halves]:
    found = lowered(frozenset({0}))
    assert found.halves is not None
    return found, found.halves


def arrivals(rewritten: Rewritten) -> list[Node]:
    return rewritten.main.graph.find_nodes(op="call_function", target=ARRIVE)


def test_a_parameter_arrives_before_what_reads_it_first() -> None:
    found = lowered(frozenset())
    order = {node: i for i, node in enumerate(found.main.graph.nodes)}
    met = set()
    for arrival in arrivals(found):
        for holder in arrival.args[0]:  # type: ignore[union-attr]
            met.add(holder)
            others = [order[u] for u in holder.users if u is not arrival]  # type: ignore[union-attr,index]
            assert others
            assert order[arrival] < min(others)
    holders = found.main.graph.find_nodes(op="placeholder")
    parameters = {h for h, s in zip(holders, found.slots, strict=False) if s.kind is Kind.PARAMETER}
    assert met == parameters
    assert len(arrivals(found)) == 4, "each bucket by itself, where the forward gets to it"


def test_gathers_end_in_graphs_of_their_own() -> None:
    """In the order of the forward: the bucket of the first layer first."""
    found, halves = boundary()
    assert halves.second is not None
    assert len(halves.second.graph.find_nodes(op="call_function", target=ALL_GATHER)) == 4
    for hidden in halves.hidden:
        assert len(hidden.module.graph.find_nodes(op="call_function", target=WAIT)) == 1
    assert [name for hidden in halves.hidden for _, name in hidden.parameters] == [
        "0.weight",
        "1.weight",
        "2.weight",
        "3.weight",
    ]
    plain = lowered(frozenset({0}), hides=False)
    assert plain.halves is not None
    assert plain.halves.hidden == ()
    assert arrivals(plain) == []


def without_an_arrival(rewritten: Rewritten, halves: Halves) -> None:
    graph = halves.first.graph
    graph.erase_node(graph.find_nodes(op="call_function", target=ARRIVE)[1])


def without_a_write(rewritten: Rewritten, halves: Halves) -> None:
    graph = halves.hidden[0].module.graph
    copy = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)[0]
    graph.erase_node(copy)


def without_a_gather(rewritten: Rewritten, halves: Halves) -> None:
    object.__setattr__(halves, "hidden", halves.hidden[1:])


@pytest.mark.parametrize("fault", [without_an_arrival, without_a_write, without_a_gather])
def test_a_fault_is_found(fault: Callable[[Rewritten, Halves], None]) -> None:
    found, halves = boundary()
    check_lowered(found)
    fault(found, halves)
    with pytest.raises(VerificationError, match="boundary program, in lowering"):
        check_lowered(found)
