"""Which values depend on parameters alone, and which are linear in the rest.

invariant     made of tensors that nothing writes inside a window, by ops that give the same each time
linear        a node whose value is a linear function of its other inputs, with invariant values as coefficients:
              f(a + b) = f(a) + f(b), so a sum over micro-steps may be taken before it or after it

Nothing here reads a name or a module's path; ops say what they do.
"""

from __future__ import annotations

import operator
from collections.abc import Collection
from typing import Any

import torch
from torch.fx import Graph, Node

from gradsync_fx._torch import OpOverload
from gradsync_fx.ir.dataflow import downstream
from gradsync_fx.ir.ops import argument


_aten = torch.ops.aten
# Ops of other libraries may read what no graph shows.
_KNOWN = ("aten", "prims", "quantized_decomposed")
_CHANGING = (torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output)
# Linear in their first argument; the others are numbers, shapes and positions.
_OF_ONE = frozenset(
    {
        _aten.alias.default,
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.clone.default,
        _aten.t.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
        _aten.unsqueeze.default,
        _aten.expand.default,
        _aten.slice.Tensor,
        _aten.select.int,
        _aten.flip.default,
        _aten.sum.default,
        _aten.sum.dim_IntList,
        _aten.mean.default,
        _aten.mean.dim,
        _aten.neg.default,
        _aten.mul.Scalar,
        _aten.div.Scalar,
        _aten.slice_backward.default,
        _aten.select_backward.default,
    }
)
_PRODUCTS = frozenset({_aten.mul.Tensor, _aten.mm.default, _aten.bmm.default, _aten.mv.default})
_SUMS = frozenset({_aten.add.Tensor, _aten.sub.Tensor})
ZEROS = frozenset({_aten.full.default, _aten.scalar_tensor.default, _aten.full_like.default})
# Their first argument is the gradient; the others are what forward had.
_GRADIENTS = frozenset({_aten._weight_norm_interface_backward.default})
# f(.., a + b, ..) = f(.., a, ..) + f(.., b, ..), for each of these positions by itself.
DISTRIBUTES: dict[Any, tuple[int, ...]] = {
    **dict.fromkeys((*_OF_ONE, *_GRADIENTS, operator.getitem, _aten.div.Tensor), (0,)),
    **dict.fromkeys(_PRODUCTS, (0, 1)),
}


def invariant_nodes(graph: Graph, steady: Collection[Node]) -> frozenset[Node]:
    """Nodes that depend on no input but `steady` ones; constants among them, placeholders not.

    steady: placeholders that nothing writes inside a window. Random numbers, collectives, values that the host reads,
    ops of other libraries and ops that write are not invariant, nor is what depends on them.
    """
    found: set[Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            found.add(node)
        elif node.op == "call_function" and all(
            n in found or n in steady for n in node.all_input_nodes
        ):
            found |= {node} if _repeats(node) else set()
    return frozenset(found)


def _repeats(node: Node) -> bool:
    """Whether an op gives tensors, the same for the same inputs, and does nothing else."""
    target = node.target
    if target is operator.getitem:
        return True
    if not isinstance(target, OpOverload) or target.namespace not in _KNOWN:
        return False
    if target._schema.is_mutable or any(tag in target.tags for tag in _CHANGING):
        return False
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else (value,)
    return all(isinstance(v, torch.Tensor) or v is None for v in values)


class LinearIn:
    """Asks a graph which nodes are linear in their inputs that are not invariant.

    steady: placeholders that nothing writes inside a window. invariant: nodes made of these, and constants; they and
    the placeholders count as coefficients. partial: markers that only add to the next one of their leaf.
    """

    def __init__(
        self,
        steady: Collection[Node],
        invariant: Collection[Node],
        partial: Collection[Node],
    ) -> None:
        self._invariant, self._partial = frozenset((*steady, *invariant)), partial
        self._made_of_tensors = downstream(steady, through=invariant.__contains__)

    def inputs(self, node: Node) -> tuple[Node, ...]:
        """The inputs that a node is linear in, all at once; empty for any other node.

        Only within one dtype: a cast is where a sum of wide terms begins.
        """
        if node.op != "call_function":
            return ()
        found = self._linear(node)
        return found if found and all(_dtype(n) == _dtype(node) for n in found) else ()

    def coefficients(self, node: Node) -> list[Node]:
        """The values of parameters and buffers that scale what a linear node is given; constants are not among them."""
        return [n for n in node.all_input_nodes if n in self._made_of_tensors]

    def _linear(self, node: Node) -> tuple[Node, ...]:
        target = node.target
        varying = [n for n in node.all_input_nodes if n not in self._invariant]
        if node in self._partial:
            return (argument(node, 0),)
        if target is operator.getitem or target in _OF_ONE or target in _GRADIENTS:
            return (varying[0],) if varying == [node.args[0]] else ()
        if target in _PRODUCTS:
            one = len(varying) == 1 and node.args.count(varying[0]) == 1
            return (varying[0],) if one else ()
        if target is _aten.div.Tensor:
            return (varying[0],) if varying == [node.args[0]] else ()
        if target in _SUMS:
            return self._sum(node, varying)
        if target is _aten.where.self:
            return self._selected(node, varying)
        return ()

    def _sum(self, node: Node, varying: list[Node]) -> tuple[Node, ...]:
        """Of two terms of the result's own shape: either of them may be zero, then."""
        terms = node.args[:2]
        if node.kwargs or len(varying) != 2 or set(terms) != set(varying):
            return ()
        shape = node.meta["val"].shape
        return tuple(varying) if all(n.meta["val"].shape == shape for n in varying) else ()

    def _selected(self, node: Node, varying: list[Node]) -> tuple[Node, ...]:
        """Some elements of one value, and zeros elsewhere."""
        condition, *branches = node.args
        if len(varying) != 1 or varying[0] is condition:
            return ()
        others = [n for n in branches if n is not varying[0]]
        shape = varying[0].meta["val"].shape == node.meta["val"].shape
        return (varying[0],) if shape and len(others) == 1 and _is_zero(others[0]) else ()


def _is_zero(value: object) -> bool:
    if not isinstance(value, Node) or value.target not in ZEROS:
        return False
    return bool(next(a for a in value.args[::-1] if not isinstance(a, list | tuple)) == 0)


def _dtype(node: Node) -> torch.dtype | None:
    value = node.meta.get("val")
    first = value[0] if isinstance(value, list | tuple) else value
    if not isinstance(first, torch.Tensor) or not first.dtype.is_floating_point:
        return None
    return first.dtype
