"""One spelling for what later stages match: today, a functional copy onto something of the same form is its source."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from gradsync_fx.ops import argument


def canonicalize(module: GraphModule) -> None:
    """copy(a, b) -> b where shape, dtype and device agree (functionalised in-place writes: `dist.all_reduce(grad)`)."""
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.copy.default):
        onto, source = argument(node, 0).meta["val"], argument(node, 1).meta["val"]
        if (onto.shape, onto.dtype, onto.device) == (source.shape, source.dtype, source.device):
            node.replace_all_uses_with(argument(node, 1))
            module.graph.erase_node(node)
    module.recompile()
