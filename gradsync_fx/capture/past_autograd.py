"""Writes past autograd (`p.data.clamp_(...)`, `p.detach().copy_(...)`) become `copy_` nodes of the graph.

return (clamp, ...)     AOTAutograd would copy `clamp` into p after the program, whichever program that is
copy_(p, clamp)         now the write stands in the graph, and belongs to the program that it belongs to
return (p, ...)         what AOTAutograd copies is p itself
set_(p, value)          `p.data = value`: a write, where the value has memory of its own and p's shape, strides, dtype

Where an output is an input that the graph wrote, AOTAutograd puts the input in its place, counted from the first of
these writes and not from the outputs after them (seen in 2.13): another output would be lost. That is done here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from gradsync_fx._torch import (
    OutputType,
    aot_wrappers,
    inputs_given_back,
    written_outside,
)
from gradsync_fx.errors import CaptureError
from gradsync_fx.ir.memory import base_of
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import output_values


_aten = torch.ops.aten


def outputs_in_their_places() -> AbstractContextManager[Any]:
    """AOTAutograd returns the graph's own outputs, where it would return inputs instead."""
    kinds = SimpleNamespace(**{**OutputType.__members__, OutputType.is_input.name: None})
    return mock.patch.object(aot_wrappers, "OutputType", kinds)


def keep_writes(module: GraphModule, name_of: Callable[[int], str]) -> None:
    """Puts the writes that AOTAutograd would make after the graph into the graph, in place.

    name_of: what people call an input, by its position. Raises `CaptureError` for one that becomes another tensor.
    """
    holders = module.graph.find_nodes(op="placeholder")
    (out,) = module.graph.find_nodes(op="output")
    values = output_values(module)
    outside = written_outside()
    for output, index in inputs_given_back().items():
        values[len(outside) + output] = holders[index]
    for position, (index, replaced) in enumerate(outside):
        holder, value = holders[index], values[position]
        if replaced:
            raise _other_memory(name_of(index))
        with module.graph.inserting_before(out):
            written = module.graph.call_function(_aten.copy_.default, (holder, value))
        written.meta.update(holder.meta)
        values[position] = holder
    out.args = (tuple(values),)
    for node in module.graph.find_nodes(op="call_function", target=_aten.set_.source_Tensor):
        holder, value = argument(node, 0), argument(node, 1)
        if holder not in holders or not _is_fresh(value) or not _alike(holder, value):
            known = holder in holders
            raise _other_memory(name_of(holders.index(holder)) if known else "a tensor")
        node.target = _aten.copy_.default


def _is_fresh(value: Node) -> bool:
    """Whether it lies in memory of its own: no view of an input, which both would go on to share."""
    return base_of(value).op == "call_function"


def _alike(holder: Node, value: Node) -> bool:
    one, other = holder.meta["val"], value.meta["val"]
    return (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)


def _other_memory(name: str) -> CaptureError:
    return CaptureError(
        f"{name} in the step",
        seen="it is given other memory, another shape or other strides (x.data = y, set_, transpose_, resize_)",
        wanted="writes into tensors that stay what they are",
        fix="write into it: x.data.copy_(y), or x.copy_(y) under torch.no_grad()",
    )
