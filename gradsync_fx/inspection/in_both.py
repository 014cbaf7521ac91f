"""Which nodes of the boundary program the accumulate program has, too.

A node that was captured is known by the node of the step that it was made from. One that a pass added is the same in
both where it computes the same from the same: the sum with an accumulator is, the mean of what was reduced is not.
"""

from __future__ import annotations

from torch.fx import Node
from torch.fx.node import map_arg

from gradsync_fx.ir.program import Program


def shared_nodes(boundary: Program, accumulate: Program) -> frozenset[Node]:
    """The boundary's nodes that the accumulate program has, too."""
    numbers: dict[object, int] = {}
    there = set(_numbered(accumulate, numbers).values())
    return frozenset(n for n, number in _numbered(boundary, numbers).items() if number in there)


def _numbered(program: Program, numbers: dict[object, int]) -> dict[Node, int]:
    """A number for what each node stands for, the same in both programs."""
    inputs = program.module.graph.find_nodes(op="placeholder")
    slots = dict(zip(inputs, program.slots, strict=True))
    found: dict[Node, int] = {}
    for node in program.module.graph.nodes:
        origin = node.meta.get("origin")
        key: object
        if node in slots:
            key = (slots[node].kind, slots[node].key)
        elif origin is not None:
            key = origin
        else:
            given = map_arg((node.args, node.kwargs), lambda n: f"%{found[n]}")
            key = (str(node.target), str(given))
        found[node] = numbers.setdefault(key, len(numbers))
    return found
