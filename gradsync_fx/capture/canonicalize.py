"""Canonicalization: one spelling for what later passes match (functional copies, scaling of tensor lists)."""

from __future__ import annotations

import operator

import torch
from torch.fx import GraphModule

from gradsync_fx.ir.memory import base_of
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import writes


_aten = torch.ops.aten
_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
# Of a list by one number or one tensor without dimensions, as clipping does.
_OF_LISTS = {
    _aten._foreach_mul.Tensor: _aten.mul.Tensor,
    _aten._foreach_mul.Scalar: _aten.mul.Tensor,
    _aten._foreach_div.Tensor: _aten.div.Tensor,
    _aten._foreach_div.Scalar: _aten.div.Tensor,
}


def canonicalize(module: GraphModule) -> None:
    """Rewrites the graph in place; no value changes:

    copy(a, b)                   -> b               where shape, dtype and device agree (functionalised in-place
                                                    writes: `dist.all_reduce(grad)`), unless b is an input that is
                                                    written: a use might then read it after that write
    all_gather(number)           -> all_gather(unsqueeze(number, 0))        gloo gathers nothing without dimensions
    foreach_mul([a, b], c)[i]    -> mul(a, c)       a gradient's scaling depends on the one gradient that it scales
    """
    graph = module.graph
    written = {argument(write, 0) for write in writes(module)}
    for node in graph.find_nodes(op="call_function", target=_aten.copy.default):
        onto, source = argument(node, 0).meta["val"], argument(node, 1).meta["val"]
        if base_of(argument(node, 1)) in written:
            continue
        if (onto.shape, onto.dtype, onto.device) == (source.shape, source.dtype, source.device):
            node.replace_all_uses_with(argument(node, 1))
            graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_ALL_GATHER):
        number = argument(node, 0)
        if not number.meta["val"].dim():
            with graph.inserting_before(node):
                row = graph.call_function(_aten.unsqueeze.default, (number, 0))
            row.meta.update(number.meta, val=number.meta["val"].unsqueeze(0))
            node.replace_input_with(number, row)
    for many, one in _OF_LISTS.items():
        for node in graph.find_nodes(op="call_function", target=many):
            if any(item.target is not operator.getitem for item in node.users):
                continue
            for item in list(node.users):
                with graph.inserting_before(item):
                    source = argument(node, 0)[argument(item, 1)]
                    scaled = graph.call_function(one, (source, node.args[1]))
                scaled.meta.update(item.meta)
                item.replace_all_uses_with(scaled)
                graph.erase_node(item)
            graph.erase_node(node)
    module.recompile()
