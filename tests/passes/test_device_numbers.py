"""Numbers of a program for a GPU as one vector: what is moved, what is not, and that the proof sees a fault.

On a device that is not there: values are fake, and nothing runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import ITEM
from gradsync_fx.ir.program import Kind, Program, Slot
from gradsync_fx.passes import rewrite
from gradsync_fx.passes.device_numbers import host_numbers, numbers_on_device
from gradsync_fx.passes.rewritten import Rewritten


aten = torch.ops.aten
PASSES: Any = [("", numbers_on_device)]
Make = Callable[..., Any]


def program(
    build: Callable[[Make, Node, Node, Node], Node], device: str = "cuda"
) -> tuple[Any, Any]:
    """p <- build(p, lr, scale), for two numbers of the host."""
    mode, graph = FakeTensorMode(shape_env=ShapeEnv()), Graph()
    p, lr, scale = (graph.placeholder(n) for n in ("p", "lr", "scale"))
    with mode:
        p.meta["val"] = torch.empty(4, device=device)
        for number in (lr, scale):
            number.meta["val"] = torch.empty((), dtype=torch.float64)

    def make(target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(graph, mode, target, args, kwargs)

    make(aten.copy_.default, p, build(make, p, lr, scale))
    graph.output(())
    slots = (
        Slot(Kind.PARAMETER, "p", 0),
        Slot(Kind.SCALAR, "lr", 0),
        Slot(Kind.SCALAR, "scale", 1),
    )
    return Program("boundary", GraphModule({}, graph), slots), mode


def lowered(build: Callable[[Make, Node, Node, Node], Node], device: str = "cuda") -> Rewritten:
    """Proved by `rewrite`."""
    return rewrite(*program(build, device), Journal(), PASSES)


def targets(found: Rewritten) -> list[Any]:
    return [n.target for n in found.main.graph.nodes if n.op == "call_function"]


def update(make: Make, p: Node, lr: Node, scale: Node) -> Node:
    step = make(aten.add.Tensor, p, p, alpha=make(ITEM, lr))
    return make(aten.div.Tensor, step, scale)


def test_numbers_come_in_one_vector() -> None:
    found = lowered(update)
    assert found.numbers == (1, 2)
    holders = found.main.graph.find_nodes(op="placeholder")
    assert [h.name for h in holders] == ["p", "numbers"]
    assert holders[1].meta["val"].device.type == "cuda"
    assert holders[1].meta["val"].dtype is torch.float64
    assert ITEM not in targets(found)
    assert host_numbers(found) == []


def test_nothing_changes_on_a_cpu() -> None:
    found = lowered(update, "cpu")
    assert found.numbers == ()
    assert targets(found).count(ITEM) == 1


def test_arithmetic_on_numbers_is_done_in_float64() -> None:
    """max(eps, |p| / n) * lr, as Adafactor has it: in eager the host waits for the norm."""

    def adafactor(make: Make, p: Node, lr: Node, scale: Node) -> Node:
        norm = make(ITEM, make(aten.sum.default, p))
        size = make(operator.truediv, norm, make(ITEM, scale))
        bound = make(torch.sym_max, 1e-3, size)
        step = make(operator.neg, make(operator.mul, bound, make(ITEM, lr)))
        return make(aten.add.Tensor, p, p, alpha=step)

    found = lowered(adafactor)
    assert ITEM not in targets(found)
    assert host_numbers(found) == []
    numbers = [
        n for n in found.main.graph.nodes if n.target in (aten.clamp_min.default, aten.neg.default)
    ]
    assert [n.meta["val"].dtype for n in numbers] == [torch.float64] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_number_is_rounded_to_what_the_op_computes_in(dtype: torch.dtype) -> None:
    def product(make: Make, p: Node, lr: Node, scale: Node) -> Node:
        lower = make(torch.ops.prims.convert_element_type.default, p, dtype)
        value = make(aten.mul.Tensor, lower, make(ITEM, lr))
        return make(torch.ops.prims.convert_element_type.default, value, torch.float32)

    (multiplied,) = lowered(product).main.graph.find_nodes(
        op="call_function", target=aten.mul.Tensor
    )
    wanted = torch.float32 if dtype is torch.bfloat16 else dtype
    assert multiplied.args[1].meta["val"].dtype is wanted
    assert multiplied.meta["val"].dtype is dtype


def test_what_only_the_host_can_do_with_a_number_stays_there() -> None:
    def rounded(make: Make, p: Node, lr: Node, scale: Node) -> Node:
        number = make(ITEM, lr)
        return make(aten.add.Tensor, make(aten.lerp.Scalar, p, p, number), make(ITEM, scale))

    found = lowered(rounded)
    assert found.numbers == (2,)
    assert len(host_numbers(found)) == 1  # no graph of the device's may be recorded with it


@pytest.mark.parametrize("fault", ["another number", "another op"])
def test_a_fault_is_seen(fault: str) -> None:
    def planted(rewritten: Rewritten) -> None:
        numbers_on_device(rewritten)
        graph = rewritten.main.graph
        if fault == "another number":
            first = graph.find_nodes(op="call_function", target=aten.select.int)[0]
            first.update_arg(2, 1)
        else:
            graph.find_nodes(op="call_function", target=aten.mul.Tensor)[0].target = aten.div.Tensor

    with pytest.raises(VerificationError, match="lowering"):
        rewrite(*program(update), Journal(), [("", planted)])
