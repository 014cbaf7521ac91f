"""Alias analysis by the schemas of ops: which values of a graph share memory (views, list items, writes in place)."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable
from functools import cache
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx._torch import OpOverload


_aten = torch.ops.aten
# They may hand out their input itself.
MAY_ALIAS = frozenset(
    {
        _aten.reshape.default,
        _aten.contiguous.default,
        _aten._to_copy.default,
        _aten.lift_fresh_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@cache
def aliased(target: Any) -> int | None:
    """The position of the argument whose memory an op's result lies in; None where the result has its own.

    That is a view's base, the list of an item, or what is written in place.
    """
    if target is operator.getitem:
        return 0
    if not isinstance(target, OpOverload) or not target._schema.returns:
        return None
    if target._schema.returns[0].alias_info is None:
        return None
    arguments = target._schema.arguments
    return next((i for i, a in enumerate(arguments) if a.alias_info is not None), None)


@cache
def written(target: Any) -> tuple[int, ...]:
    """The positions of the arguments that an op writes."""
    if not isinstance(target, OpOverload):
        return ()
    arguments = enumerate(target._schema.arguments)
    return tuple(i for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def viewed(target: Any) -> int | None:
    """The position of the argument that an op's result is a view of; None for any other op."""
    return None if written(target) else aliased(target)


def base_of(node: Node, also: Collection[Any] = ()) -> Node:
    """The node whose memory a value lies in, through any number of views; itself where it has its own.

    also: ops that may return their first argument as it is.
    """
    while True:
        index = 0 if node.target in also else aliased(node.target)
        base = node.args[index] if index is not None and index < len(node.args) else None
        if not isinstance(base, Node):
            return node
        node = base


def base_of_views(node: Node) -> Node:
    """The node that made what a value is a view of; the item, of one that made several."""
    while node.op == "call_function" and node.target is not operator.getitem:
        index = viewed(node.target)
        base = None if index is None else node.args[index]
        if not isinstance(base, Node):
            break
        node = base
    return node


def form_apart(value: Any) -> Any:
    """A fake value of the same shape, strides and dtype, with a storage of its own."""
    return value.new_empty_strided(value.shape, value.stride())


def order_by_memory(nodes: Iterable[Node], free: Collection[Any]) -> dict[Node, frozenset[Node]]:
    """What each has to come after, though it reads no value of it: reads and writes of one memory, and effects.

    free: ops that have no effect but on the memory that they write.
    """
    written_by: dict[Node, Node] = {}
    readers: dict[Node, list[Node]] = {}
    found: dict[Node, frozenset[Node]] = {}
    effect: Node | None = None
    for node in nodes:
        after: set[Node] = set()
        onto = {base_of(n) for n in _written_by(node)}
        for memory in {base_of(n) for n in node.all_input_nodes}:
            after.update([written_by[memory]] if memory in written_by else [])
            if memory in onto:
                after.update(readers.pop(memory, ()))
                written_by[memory] = node
            readers.setdefault(memory, []).append(node)
        if node.is_impure() and node.target not in free:
            after.update([effect] if effect is not None else [])
            effect = node
        found[node] = frozenset(after - {node})
    return found


def _written_by(node: Node) -> Iterable[Node]:
    for index in written(node.target):
        given = node.args[index] if index < len(node.args) else ()
        yield from (
            n
            for n in (given if isinstance(given, list | tuple) else [given])
            if isinstance(n, Node)
        )
