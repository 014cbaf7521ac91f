"""Norms of sums as one op for a GPU: the same norms, proved, and what stays as it is.

On a device that is not there: values are fake. The graphs before and after run on tensors of the CPU.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Program, Slot
from gradsync_fx.passes.check_lowered import check_lowered
from gradsync_fx.passes.norms import NORMS, norms_of_sums
from gradsync_fx.passes.rewritten import Rewritten


aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
COUNT = 8
Scale = Callable[..., Node]


def divided(make: Scale, total: Node, i: int, divisor: Node) -> Node:
    return make(aten.div.Tensor, total, divisor)


def divided_and_turned(make: Scale, total: Node, i: int, divisor: Node) -> Node:
    """A negative factor, too."""
    return make(aten.mul.Tensor, make(aten.div.Tensor, total, divisor), -0.5)


class Clipping:
    """The norm of all gradients, which `scale` makes of sums, as clip_grad_norm_ has it.

    buckets: indices of the sums of each, waited for first.
    """

    def __init__(
        self,
        scale: Any = divided,
        *,
        order: float = 2.0,
        count: int = COUNT,
        buckets: tuple[tuple[int, ...], ...] = (),
        device: str = "cuda",
    ) -> None:
        mode, graph = FakeTensorMode(), Graph()
        sums = [graph.placeholder(f"sum{i}") for i in range(count)]
        divisor = graph.placeholder("divisor")
        with mode:
            for i, node in enumerate(sums):
                node.meta["val"] = torch.empty(i + 2, 3, device=device)
            divisor.meta["val"] = torch.empty((), dtype=torch.float64)

        def make(target: Any, *args: Any) -> Node:
            return emit(graph, mode, target, args, {})

        for bucket in buckets:
            make(WAIT_SUMS, [sums[i] for i in bucket])
        gradients = [scale(make, total, i, divisor) for i, total in enumerate(sums)]
        many = make(aten._foreach_norm.Scalar, gradients, order)
        items = [make(operator.getitem, many, i) for i in range(count)]
        stack = make(aten.cat.default, [make(aten.unsqueeze.default, item, 0) for item in items])
        graph.output((make(aten.mul.Tensor, stack, 1.0),))
        slots = [Slot(Kind.ACCUMULATOR, n.name, n.name) for n in sums]
        slots.append(Slot(Kind.SCALAR, "divisor", "divisor"))
        self.program = Program("boundary", GraphModule(torch.nn.Module(), graph), tuple(slots))
        self.rewritten = Rewritten.copy_of(self.program, mode)
        norms_of_sums(self.rewritten)
        self.rewritten.main.graph.lint()
        self.rewritten.main.recompile()

    @property
    def parts(self) -> list[list[str]]:
        """The sums of each op."""
        found = self.rewritten.main.graph.find_nodes(op="call_function", target=NORMS)
        return [[n.name for n in node.args[0]] for node in found]

    def norms(self) -> tuple[Tensor, Tensor]:
        """Before and after."""
        generator = torch.Generator().manual_seed(0)
        sums = [torch.randn(i + 2, 3, generator=generator) for i in range(COUNT)]
        divisor = torch.tensor(7.0, dtype=torch.float64)
        (before,), (after,) = (
            module(*sums, divisor) for module in (self.program.module, self.rewritten.main)
        )
        return before, after


@pytest.mark.parametrize("scale", [divided, divided_and_turned])
@pytest.mark.parametrize("order", [2.0, 1, 3.5, float("inf")])
def test_norms_are_the_same_and_proved(order: float, scale: Any) -> None:
    clipping = Clipping(scale, order=order)
    assert clipping.parts == [[f"sum{i}" for i in range(COUNT)]]
    check_lowered(clipping.rewritten)
    before, after = clipping.norms()
    torch.testing.assert_close(after, before, rtol=1e-6, atol=0.0)


def test_each_bucket_by_itself_where_it_is_worth_it() -> None:
    """Three kernels for each op: for buckets of two sums one op reads all."""
    many = Clipping(buckets=((0, 1, 2, 3), (4, 5, 6, 7)))
    assert [len(part) for part in many.parts] == [4, 4]
    few = Clipping(buckets=((0, 1), (2, 3), (4, 5), (6, 7)))
    assert [len(part) for part in few.parts] == [8]


def halved(make: Scale, total: Node, i: int, divisor: Node) -> Node:
    return make(aten.mul.Tensor, total, 0.5 if i else 0.25)


def in_bfloat16(make: Scale, total: Node, i: int, divisor: Node) -> Node:
    return make(CAST, make(aten.div.Tensor, total, divisor), torch.bfloat16)


def made(make: Scale, total: Node, i: int, divisor: Node) -> Node:
    return make(aten.div.Tensor, make(aten.add.Tensor, total, total), divisor)


def each_by_its_own(make: Scale, total: Node, i: int, divisor: Node) -> Node:
    factors = make(aten.sum.dim_IntList, total, [0])
    return make(aten.mul.Tensor, total, factors)


@pytest.mark.parametrize("scale", [halved, in_bfloat16, made, each_by_its_own])
def test_what_is_scaled_in_another_way_stays(scale: Any) -> None:
    """By factors that differ, with a rounding, of what has to be stored, or by no number."""
    assert Clipping(scale).parts == []


@pytest.mark.parametrize("changes", [{"order": 0}, {"device": "cpu"}, {"count": 3}])
def test_where_it_is_wrong_or_not_worth_it(changes: dict[str, Any]) -> None:
    assert Clipping(**changes).parts == []


def exchanged(norms: Node) -> None:
    """Two sums: another order of the norms."""
    first, second, *others = argument(norms, 0)
    norms.update_arg(0, [second, first, *others])


def of_another_order(norms: Node) -> None:
    norms.update_arg(1, 3.0)


def unscaled(norms: Node) -> None:
    (scaled,) = norms.users
    scaled.replace_all_uses_with(norms)
    scaled.graph.erase_node(scaled)


def without_a_sum(norms: Node) -> None:
    first, *others = argument(norms, 0)
    norms.update_arg(0, [first, *others[:-1], first])


@pytest.mark.parametrize("fault", [exchanged, of_another_order, unscaled, without_a_sum])
def test_a_fault_is_found(fault: Callable[[Node], None]) -> None:
    clipping = Clipping()
    (norms,) = clipping.rewritten.main.graph.find_nodes(op="call_function", target=NORMS)
    fault(norms)
    with pytest.raises(VerificationError, match="output 0"):
        check_lowered(clipping.rewritten)


def test_sums_that_are_written_before_are_found() -> None:
    """The norms are those of what the sums held."""
    clipping = Clipping()
    (norms,) = clipping.rewritten.main.graph.find_nodes(op="call_function", target=NORMS)
    graph, total = clipping.rewritten.main.graph, argument(norms, 0)[0]
    with graph.inserting_before(norms):
        emit(graph, clipping.rewritten.fake_mode, aten.copy_.default, (total, total), {})
    check_lowered(clipping.rewritten)
    with graph.inserting_before(norms):
        doubled = emit(graph, clipping.rewritten.fake_mode, aten.add.Tensor, (total, total), {})
        emit(graph, clipping.rewritten.fake_mode, aten.copy_.default, (total, doubled), {})
    with pytest.raises(VerificationError):
        check_lowered(clipping.rewritten)
