"""Faults that are planted in a boundary program ahead of lowering: each is one that a check has to find."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.ir.program import Program


_functional = torch.ops._c10d_functional


def plant(fault: str, program: Program) -> None:
    FAULTS[fault](program.module)
    program.module.graph.lint()
    program.module.recompile()


def reduced_late(module: GraphModule) -> None:
    """No bucket is sent before the last one is whole: what reads a reduction goes with it."""
    reductions = _reductions(module)
    last = reductions[-1]
    later: set[Node] = set()
    for node in module.graph.nodes:
        if node in reductions or later.intersection(node.all_input_nodes):
            later.add(node)
    before = [n for n in module.graph.nodes if n in later and n < last]
    for node in reversed(before):
        last.append(node)


def reduced_twice(module: GraphModule) -> None:
    """A bucket is sent two times."""
    first = _reductions(module)[0]
    (waited,) = first.users
    with module.graph.inserting_after(waited):
        again = module.graph.call_function(first.target, (waited, *first.args[1:]))
    with module.graph.inserting_after(again):
        second = module.graph.call_function(waited.target, (again,))
    for node, like in ((again, first), (second, waited)):
        node.meta.update(like.meta)
        with like.meta["val"].fake_mode:
            node.meta["val"] = torch.empty_like(like.meta["val"])
    waited.replace_all_uses_with(second, delete_user_cb=lambda user: user not in (again, second))


def host_waits(module: GraphModule) -> None:
    """The host asks the device for the loss, as an integer, to multiply it by that."""
    (out,) = module.graph.find_nodes(op="output")
    outputs = list(out.args[0])  # type: ignore[arg-type]
    loss = next(n for n in outputs if isinstance(n, Node) and n.meta["val"].dim() == 0)
    mode = loss.meta["val"].fake_mode
    with module.graph.inserting_before(out), mode:
        cast, read = torch.ops.prims.convert_element_type, torch.ops.aten._local_scalar_dense
        whole = module.graph.call_function(cast.default, (loss, torch.int64))
        whole.meta["val"] = torch.empty_like(loss.meta["val"], dtype=torch.int64)
        number = module.graph.call_function(read.default, (whole,))
        number.meta["val"] = mode.shape_env.create_unbacked_symint()
        mode.shape_env.pending_fresh_unbacked_symbols.clear()  # here it is bound
        product = module.graph.call_function(torch.ops.aten.mul.Tensor, (loss, number))
        product.meta["val"] = torch.empty_like(loss.meta["val"])
    outputs[outputs.index(loss)] = product
    out.args = (tuple(outputs),)


FAULTS: dict[str, Callable[[GraphModule], None]] = {
    "reduced_late": reduced_late,
    "reduced_twice": reduced_twice,
    "host_waits": host_waits,
}


def _reductions(module: GraphModule) -> list[Node]:
    return [n for n in module.graph.nodes if "all_reduce" in str(n.target)]
