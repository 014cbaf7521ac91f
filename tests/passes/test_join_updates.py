"""Updates of a bucket joined for a GPU: which lists there are, what is left by itself, and the same numbers.

On a device that is not there: values are fake. The graphs before and after run on tensors of the CPU.
"""

from __future__ import annotations

import operator
from itertools import cycle, islice
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.program import Kind, Program, Slot
from gradsync_fx.passes.join_updates import CAST, JOINED, join_updates
from gradsync_fx.passes.rewritten import Rewritten


aten = torch.ops.aten
FP32, BF16 = torch.float32, torch.bfloat16


def momentum(*, pointwise: bool = True) -> GraphModule:
    """p, g, m -> p', m'"""
    graph = Graph()
    p, g, m = (graph.placeholder(name) for name in "pgm")
    kept = graph.call_function(aten.mul.Tensor, (m, 0.9))
    moved = graph.call_function(aten.add.Tensor, (kept, g))
    step = graph.call_function(aten.mul.Tensor, (moved, 0.1))
    graph.output((graph.call_function(aten.sub.Tensor, (p, step)), moved))
    module = GraphModule({}, graph)
    module.meta["pointwise"] = pointwise
    return module


class Boundary:
    """Parameters with a sum and a state each; their updates, then the writes of what these give, and of zeros.

    dtypes: of the parameters, in turns. buckets: indices of the sums of each, waited for first. clipped: gradients are
    sums by a factor. early: the first update's results are written ahead of the second update.
    """

    def __init__(
        self,
        count: int = 3,
        *,
        dtypes: tuple[torch.dtype, ...] = (FP32,),
        buckets: tuple[tuple[int, ...], ...] = (),
        clipped: bool = False,
        early: bool = False,
        pointwise: bool = True,
        device: str = "cuda",
    ) -> None:
        self.mode, graph = FakeTensorMode(), Graph()
        root = torch.nn.Module()
        root.add_module("update", momentum(pointwise=pointwise))
        self.forms = list(islice(cycle(dtypes), count))
        kinds = {"p": Kind.PARAMETER, "sum": Kind.ACCUMULATOR, "m": Kind.STATE}
        held = {name: [graph.placeholder(f"{name}{i}") for i in range(count)] for name in kinds}
        factor = graph.placeholder("factor")
        slots = [
            Slot(kind, f"{n}{i}", f"{n}{i}") for n, kind in kinds.items() for i in range(count)
        ]
        with self.mode:
            for nodes in held.values():
                for i, node in enumerate(nodes):
                    node.meta["val"] = torch.empty(
                        i // 2 + 2, 3, dtype=self.forms[i], device=device
                    )
            factor.meta["val"] = torch.empty((), device=device)

        def make(target: Any, *args: Any) -> Node:
            return emit(graph, self.mode, target, args, {})

        for bucket in buckets:
            make(WAIT_SUMS, [held["sum"][i] for i in bucket])
        gradients = [make(aten.mul.Tensor, t, factor) if clipped else t for t in held["sum"]]
        writes = []
        for i, (p, gradient, m) in enumerate(zip(held["p"], gradients, held["m"], strict=True)):
            call = graph.call_module("update", (p, gradient, m))
            for index, onto in enumerate((p, m)):
                item = graph.call_function(operator.getitem, (call, index))
                item.meta["val"] = onto.meta["val"]
                if early and not i:
                    make(aten.copy_.default, onto, item)
                else:
                    writes.append((onto, item))
        for total in held["sum"]:
            writes.append((total, make(aten.full.default, list(total.meta["val"].shape), 0)))
        for onto, value in writes:
            make(aten.copy_.default, onto, value)
        graph.output(())
        slots.append(Slot(Kind.SCALAR, "factor", "factor"))
        self.program = Program("boundary", GraphModule(root, graph), tuple(slots))
        self.rewritten = Rewritten.copy_of(self.program, self.mode)
        join_updates(self.rewritten)
        self.rewritten.main.graph.lint()

    @property
    def lists(self) -> list[list[Node]]:
        many = self.rewritten.main.graph.find_nodes(op="call_function", target=JOINED)
        return [node.args[0] for node in many]

    def inputs(self) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        holders = self.program.module.graph.find_nodes(op="placeholder")
        forms = [n.meta["val"] for n in holders]
        return [torch.randn(f.shape, generator=generator).to(f.dtype) for f in forms]

    def computes_the_same(self) -> bool:
        """In everything that is written, bit for bit; and something is."""
        before, mine, theirs = self.inputs(), self.inputs(), self.inputs()
        self.rewritten.main(*mine)
        self.program.module(*theirs)
        changed = sum(not torch.equal(a, b) for a, b in zip(before, theirs, strict=True))
        assert changed == len(before) - 1  # all but the factor
        return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("clipped", [False, True])
def test_lists_give_what_each_gives_by_itself(clipped: bool) -> None:
    """Of what each update writes one, one of zeros, and one of the gradients where these are computed."""
    joined = Boundary(clipped=clipped)
    assert [len(values) for values in joined.lists] == [3] * (4 if clipped else 3)
    assert joined.computes_the_same()


def test_results_of_two_that_are_exchanged_are_found() -> None:
    joined = Boundary()
    many = joined.rewritten.main.graph.find_nodes(op="call_function", target=JOINED)[0]
    first, second = islice(many.users, 2)
    first.args, second.args = second.args, first.args
    joined.rewritten.main.recompile()
    assert not joined.computes_the_same()


def test_sums_that_are_not_zeroed_are_found() -> None:
    joined = Boundary()
    for compared in joined.rewritten.main.graph.find_nodes(
        op="call_function", target=aten.lt.Tensor
    ):
        compared.target = aten.le.Tensor
    joined.rewritten.main.recompile()
    assert not joined.computes_the_same()


def test_no_value_is_a_view_of_another() -> None:
    """Inductor reads aliases off the fake values."""
    nodes = [n for n in Boundary(clipped=True).rewritten.main.graph.nodes if "val" in n.meta]
    made = [n for n in nodes if n.target is operator.getitem and n.args[0].target is JOINED]
    memories = [n.meta["val"].untyped_storage()._cdata for n in made]
    assert len(made) == 4 * 3
    assert len({*memories}) == len(memories)


def test_a_list_is_of_one_dtype() -> None:
    joined = Boundary(5, dtypes=(FP32, BF16))
    dtypes = [{n.meta["val"].dtype for n in values} for values in joined.lists]
    assert all(len(found) == 1 for found in dtypes)
    assert sorted(len(values) for values in joined.lists) == [2] * 3 + [3] * 3
    assert joined.computes_the_same()


def test_a_list_is_of_one_bucket() -> None:
    """Else the first bucket's update would wait for the second one."""
    joined = Boundary(5, buckets=((0, 2), (1, 3, 4)))
    zeros = [values for values in joined.lists if values[0].target is CAST]
    of_sums = [{n.all_input_nodes[0].all_input_nodes[0].name for n in values} for values in zeros]
    assert of_sums == [{"sum0", "sum2"}, {"sum1", "sum3", "sum4"}]
    assert sorted(len(values) for values in joined.lists) == [2] * 3 + [3] * 3


@pytest.mark.parametrize(
    "left_out",
    [{"count": 1}, {"pointwise": False}, {"device": "cpu"}],
    ids=["one alone", "of whole tensors", "on a CPU"],
)
def test_what_is_not_joined(left_out: dict[str, Any]) -> None:
    joined = Boundary(**left_out)
    assert joined.lists == []
    assert joined.computes_the_same()


def test_what_is_read_before_all_are_there_is_not_joined() -> None:
    """The writes of the first stand ahead of the others' updates: a list would come after them."""
    joined = Boundary(early=True)
    assert [[n.target for n in v] for v in joined.lists] == [
        [CAST] * 3  # the zeros alone
    ]
    assert joined.computes_the_same()


@pytest.mark.parametrize(
    ("count", "parts"),
    [(41, [41]), (120, [40, 40, 40]), (200, [50] * 4), (400, [80] * 5)],
)
def test_a_launch_has_no_more_pointers_than_it_takes(count: int, parts: list[int]) -> None:
    """Parameter, sum and momentum are read and written: 6 of a launch's usual 250; where four launches are not enough
    of 480, the most."""
    joined = Boundary(count)
    assert [len(values) for values in joined.lists[::3]] == parts
    assert max(parts) * 6 <= 480
    assert joined.computes_the_same()
