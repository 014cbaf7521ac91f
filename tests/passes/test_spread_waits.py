"""Where waits stand for a GPU: each right before its first reader, and nothing before what it needs.

On a device that is not there: values are fake, and nothing runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.program import Kind, Program, Slot
from gradsync_fx.passes.rewritten import Rewritten
from gradsync_fx.passes.spread_waits import spread_waits


aten = torch.ops.aten
Make = Callable[..., Any]


def order(build: Callable[[Make, list[Node], list[Node]], None], device: str = "cuda") -> list[str]:
    """Two buckets of one sum each, both waited for at once, then what `build` makes of them; the order afterwards."""
    mode, graph = FakeTensorMode(), Graph()
    params = [graph.placeholder(f"p{i}") for i in range(2)]
    sums = [graph.placeholder(f"sum{i}") for i in range(2)]
    with mode:
        for node in (*params, *sums):
            node.meta["val"] = torch.empty(4, device=device)

    def make(target: Any, *args: Any) -> Node:
        return emit(graph, mode, target, args, {})

    for total in sums:
        make(START_SUMS, [total], "sum", "0", torch.float32)
    for total in sums:
        make(WAIT_SUMS, [total])
    build(make, params, sums)
    graph.output(())
    slots = [Slot(Kind.PARAMETER, f"p{i}", i) for i in range(2)]
    slots += [Slot(Kind.ACCUMULATOR, f"sum{i}", f"sum{i}") for i in range(2)]
    program = Program("boundary", GraphModule({}, graph), tuple(slots))
    rewritten = Rewritten.copy_of(program, mode)
    spread_waits(rewritten)
    rewritten.main.graph.lint()
    return [told(n) for n in rewritten.main.graph.nodes if n.op == "call_function"]


def told(node: Node) -> str:
    """`wait sum0`, `sub p1 sum1`."""
    name = node.target._schema.name.partition("::")[2]  # type: ignore[union-attr]
    return " ".join([name, *(n.name for n in node.all_input_nodes)])


def updates(make: Make, params: list[Node], sums: list[Node]) -> None:
    changed = [make(aten.sub.Tensor, p, s) for p, s in zip(params, sums, strict=True)]
    for onto, value in zip((*params, *sums), (*changed, *changed), strict=True):
        make(aten.copy_.default, onto, value)


def clipped(make: Make, params: list[Node], sums: list[Node]) -> None:
    squares = [make(aten.sum.default, make(aten.mul.Tensor, s, s)) for s in sums]
    norm = make(aten.add.Tensor, *squares)
    for p, s in zip(params, sums, strict=True):
        make(aten.copy_.default, p, make(aten.sub.Tensor, p, make(aten.div.Tensor, s, norm)))


def test_an_update_stands_before_the_next_wait() -> None:
    found = order(updates)
    assert found.index("wait sum0") < found.index("sub p0 sum0") < found.index("wait sum1")
    assert found.index("wait sum1") < found.index("sub p1 sum1")
    (write,) = [i for i, text in enumerate(found) if text.startswith("copy_ sum0 ")]
    assert write > found.index("sub p0 sum0")  # the sum is read before it is written


def test_of_a_norm_the_squares_stand_between_the_waits() -> None:
    found = order(clipped)
    squares = [found.index(f"mul sum{i}") for i in range(2)]
    waits = [found.index(f"wait sum{i}") for i in range(2)]
    assert waits[0] < squares[0] < waits[1] < squares[1]
    assert all(i > squares[1] for i, text in enumerate(found) if text.startswith("sub"))


@pytest.mark.parametrize("build", [updates, clipped])
def test_on_a_cpu_nothing_moves(build: Any) -> None:
    found = order(build, "cpu")
    assert found[2:4] == ["wait sum0", "wait sum1"]
