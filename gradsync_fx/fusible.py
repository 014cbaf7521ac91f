"""What a compiler needs to see to move little memory: norms as sums, and sums written where they are made.

foreach_norm([a, b], 2)[i]   ->   sqrt(sum(a * a))    part of the loop that makes the values; the op for many tensors is
                                                      opaque, and reads values that were stored for it
copy_(acc, acc + g), last    ->   the same, right behind the sum: the gradient's memory is free for the next one
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.draft import emit
from gradsync_fx.ops import argument


_aten = torch.ops.aten


def norms_as_sums(module: GraphModule, fake_mode: Any) -> None:
    """Two-norms of many tensors at once, each spelt out. Another order of summation than eager's."""
    graph = module.graph
    for many in graph.find_nodes(op="call_function", target=_aten._foreach_norm.Scalar):
        if list(many.args[1:]) not in ([], [2], [2.0]) or many.kwargs:
            continue
        for item in list(many.users):
            if item.target is not operator.getitem:
                continue
            value = argument(many, 0)[argument(item, 1)]
            with graph.inserting_before(item):
                square = emit(graph, fake_mode, _aten.mul.Tensor, (value, value), {})
                total = emit(graph, fake_mode, _aten.sum.default, (square,), {})
                norm = emit(graph, fake_mode, _aten.sqrt.default, (total,), {})
            item.replace_all_uses_with(norm)
            graph.erase_node(item)
        if not many.users:
            graph.erase_node(many)


def resets(module: GraphModule) -> dict[Node, Node]:
    """The inputs that end as zero, each with the write of that."""
    copies = module.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return {argument(c, 0): c for c in copies if _is_zeros(argument(c, 1)) and not c.users}


def _is_zeros(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _aten.full.default and argument(node, 1) == 0


def write_early(module: GraphModule) -> None:
    """Moves each write into an input right behind what it writes, where nobody reads the input as it was after that."""
    graph = module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        onto, source = argument(copy, 0), argument(copy, 1)
        if not isinstance(source, Node) or source.op != "call_function" or copy.users:
            continue
        others = [u for u in onto.users if u is not copy]
        if onto.op == "placeholder" and all(order[u] <= order[source] for u in others):
            source.append(copy)
