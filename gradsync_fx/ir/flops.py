"""FLOPs and bytes of one node of a graph: torch's formulas, over the shapes of its fake values."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node, map_arg
from torch.utils.flop_counter import flop_registry


def flops_of(node: Node) -> int:
    """FLOPs of one node: products, convolutions and attention; 0 for all else."""
    packet = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(packet)
    if formula is None:
        return 0
    args, kwargs = map_arg((node.args, node.kwargs), lambda n: _hinted(n.meta["val"]))
    out = _hinted(node.meta["val"])
    return int(formula(*args, **kwargs, out_val=out))


def bytes_of_value(node: Node) -> int:
    """Bytes of a node's tensor, or of all tensors that it gives; a symbolic size counts as its hint."""
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    total = 0
    for tensor in values:
        if isinstance(tensor, torch.Tensor):
            elements = 1
            for size in tensor.shape:
                elements *= _hint(size)
            total += elements * tensor.dtype.itemsize
    return total


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint or 1)


def _hinted(value: Any) -> Any:
    """A tensor without storage, every size a number."""
    if isinstance(value, torch.Tensor):
        return torch.empty([_hint(s) for s in value.shape], dtype=value.dtype, device="meta")
    return value
