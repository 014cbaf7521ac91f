"""Layers that become one body: which do, that programs stay what they were, and that a fault is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node

from gradsync_fx.comm.inplace_all_reduce import START_SUMS
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.journal import Journal
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.passes import FOR_INDUCTOR, rewrite
from gradsync_fx.passes.blocks import RUN_BLOCK
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.rewritten import Rewritten
from tests.scenarios.blocks import Layer, deep, every_layer


pytestmark = pytest.mark.captured

ACCUMULATE, BOUNDARY = frozenset[int](), frozenset({0})
_aten = torch.ops.aten


def lowered(
    model: nn.Module, closing: frozenset[int], ranks: int = 1, forced: bool = True, **options: Any
) -> Rewritten:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    given = {"gradient_accumulation_steps": 2, "backend": "aot_eager", **options}
    planned = OptimizedStep(train_step, Options.of(given), simulated=ranks)
    planned.capture(model, torch.randn(4, 8), torch.randint(4, (4,)))
    (captured,) = planned._executor.catalogue.captures
    program = captured.programs.build(closing)
    mode = captured.facts.capture.fake_mode
    if not forced:
        return rewrite(program, mode, Journal(), FOR_INDUCTOR)
    with every_layer():
        return rewrite(program, mode, Journal(), FOR_INDUCTOR)


def calls(found: Rewritten) -> list[Node]:
    module = found.main if found.halves is None else found.halves.first
    return module.graph.find_nodes(op="call_function", target=RUN_BLOCK)


def code(found: Rewritten) -> list[str]:
    for block in found.blocks:
        block.module.recompile()
    return [block.module.code for block in found.blocks]


@pytest.fixture(autouse=True)
def _alike() -> None:
    torch.manual_seed(0)


def test_each_layer_is_a_call_of_one_body_forward_and_backward() -> None:
    found = lowered(deep(4), ACCUMULATE)
    assert len(found.blocks) == 2
    by_block = [[c for c in calls(found) if c.meta["block"] is b] for b in found.blocks]
    assert all(len(some) >= 3 for some in by_block), by_block
    left = found.main.graph.find_nodes(op="call_function", target=_aten.tanh.default)
    assert len(left) <= 1, "what is left is part of a layer at the edge"
    # Sums are written inside: six parameters of a layer.
    written = [len(c.args[1]) for c in by_block[1]]  # type: ignore[arg-type]
    assert set(written) == {6}


def test_a_body_does_not_know_how_deep_the_model_is() -> None:
    assert code(lowered(deep(4), ACCUMULATE)) == code(lowered(deep(9), ACCUMULATE))


def test_programs_of_a_step_share_their_bodies() -> None:
    model = deep(4)
    assert code(lowered(model, ACCUMULATE)) == code(lowered(model, BOUNDARY))


def test_small_layers_stay_where_they_are() -> None:
    assert not lowered(deep(12), ACCUMULATE, forced=False).blocks


def test_layers_with_other_constants_are_others() -> None:
    model = nn.Sequential(*(Layer(8, scale=0.5 + i) for i in range(4)), nn.Linear(8, 4))
    for block in lowered(model, ACCUMULATE).blocks:
        targets = {n.target for n in block.module.graph.nodes}
        assert _aten.tanh.default not in targets


def test_layers_of_another_width_are_others() -> None:
    layers = [
        layer
        for width in (8, 6, 8, 6)
        for layer in (Layer(8), nn.Linear(8, width), nn.Linear(width, 8))
    ]
    found = lowered(nn.Sequential(*layers, nn.Linear(8, 4)), ACCUMULATE)
    for call in calls(found):
        assert isinstance(call.args[2], list)
        assert {n.meta["val"].shape for n in call.args[2] if n.op == "placeholder"} <= {
            torch.Size(s)
            for s in ((8,), (12,), (12, 8), (8, 12), (8, 8), (6, 8), (8, 6), (6,), (4, 8))
        }


def test_one_layer_that_is_used_again_and_again() -> None:
    """Its gradient is one sum, which is written once, outside of the bodies."""
    layer = Layer(8)
    found = lowered(nn.Sequential(*[layer] * 5, nn.Linear(8, 4)), ACCUMULATE)
    assert len(found.blocks) == 2
    assert all(call.args[1] == [] for call in calls(found))


def test_reductions_start_between_layers() -> None:
    """Each after the body that writes its sums, the first before the last body: the proof says the rest."""
    found = lowered(deep(6), BOUNDARY, ranks=2, bucket_cap_mb=1e-3)
    assert found.halves is not None
    order = {node: i for i, node in enumerate(found.halves.first.graph.nodes)}
    starts = found.halves.first.graph.find_nodes(op="call_function", target=START_SUMS)
    written = {h: order[c] for c in calls(found) for h in c.args[1]}  # type: ignore[union-attr]
    assert len(starts) > 3
    for start in starts:
        assert all(order[start] > written.get(h, -1) for h in start.args[0])
    assert min(order[s] for s in starts) < max(order[c] for c in calls(found))


def test_symbolic_sizes_stay_as_they_are() -> None:
    found = lowered(deep(6), ACCUMULATE, dynamic=True)
    inputs = [v for v in found.program.inputs() if isinstance(v, torch.Tensor)]
    assert any(isinstance(n, torch.SymInt) for v in inputs for n in v.shape)
    for block in found.blocks:
        for node in block.module.graph.nodes:
            value = node.meta.get("val")
            assert not isinstance(value, torch.Tensor) or all(type(n) is int for n in value.shape)


def test_left_out_by_name() -> None:
    model = deep(4)
    found = lowered(model, ACCUMULATE)
    with every_layer():
        again = rewrite(
            found.program, found.fake_mode, Journal(), FOR_INDUCTOR, without=("blocks",)
        )
    assert found.blocks
    assert not again.blocks


def another_op(found: Rewritten) -> None:
    (node,) = found.blocks[0].module.graph.find_nodes(op="call_function", target=_aten.tanh.default)
    node.target = _aten.sigmoid.default


def another_layers_weights(found: Rewritten) -> None:
    one, two, *_ = (c for c in calls(found) if c.meta["block"] is found.blocks[0])
    weights = list(two.args[2])  # type: ignore[arg-type]
    place = next(i for i, n in enumerate(weights) if n.op == "placeholder" and n not in one.args[2])
    weights[place] = one.args[2][place]  # type: ignore[index]
    two.update_arg(2, weights)


def anothers_sums(found: Rewritten) -> None:
    one, two, *_ = (c for c in calls(found) if c.meta["block"] is found.blocks[1])
    sums = one.args[1], two.args[1]
    one.update_arg(1, sums[1])
    two.update_arg(1, sums[0])


def a_sum_less(found: Rewritten) -> None:
    module = found.blocks[1].module
    module.graph.erase_node(
        module.graph.find_nodes(op="call_function", target=_aten.copy_.default)[0]
    )


def results_swapped(found: Rewritten) -> None:
    call, *_ = calls(found)
    same: dict[Any, list[Node]] = {}
    for item in call.users:
        same.setdefault(tuple(item.meta["val"].shape), []).append(item)
    one, two, *_ = next(items for items in same.values() if len(items) > 1)
    first, second = one.args[1], two.args[1]
    one.update_arg(1, second)
    two.update_arg(1, first)


@pytest.mark.parametrize(
    "fault", [another_op, another_layers_weights, anothers_sums, a_sum_less, results_swapped]
)
def test_a_fault_is_found(fault: Any) -> None:
    found = lowered(deep(4), ACCUMULATE)
    check_lowered(found)
    fault(found)
    with pytest.raises(VerificationError):
        check_lowered(found)
