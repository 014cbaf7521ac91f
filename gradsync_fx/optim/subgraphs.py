"""A traced update as calls of a few bodies: the arithmetic of one parameter, shared by all that are treated alike.

update(p0, p1, p2, g0, ...)   ->   body(p0, g0, state of 0, scalars), body(p1, g1, ...), other(p2, g2, ...)

Found by structure: what a parameter's new value and state are made of may reach that parameter, its gradient, its
state, the group's own tensors and scalars, and nothing of any other parameter. Parameters of different shapes share a
body where every op works element by element. An update that mixes parameters (a norm over all of them) is one body.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from gradsync_fx._torch import OpOverload
from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.ops import ITEM
from gradsync_fx.ir.program import form_of


Place = tuple[str, int, Any]  # ("group", index, key) or ("state", position, key)
_aten = torch.ops.aten
# Element by element as well, though torch does not tag them so.
_POINTWISE = frozenset(
    {
        ITEM,
        _aten.clone.default,
        _aten.detach.default,
        _aten.detach_copy.default,
        _aten.zeros_like.default,
        _aten.full_like.default,
        _aten._to_copy.default,
        torch.ops.prims.convert_element_type.default,
    }
)


@dataclass(frozen=True, slots=True, eq=False)
class Body:
    """Inputs: params, grads, state tensors, scalars (of one element each). Outputs: new params, new state.

    pointwise: for one parameter, and every op works element by element (tensors without dimensions apart), so that
    it may run over any number of elements in any order. tensors: constants, by the targets of `get_attr` nodes.
    """

    graph: Graph
    tensors: dict[str, torch.Tensor]
    pointwise: bool


@dataclass(frozen=True, slots=True)
class BodyCall:
    """One use of a body. params: positions in the optimizer; states, scalars: positions in the update's lists.

    written: the positions of the body's outputs after the new params.
    """

    body: Body
    params: tuple[int, ...]
    states: tuple[int, ...]
    scalars: tuple[int, ...]
    written: tuple[Place, ...]


def whole(
    graph: Graph,
    tensors: dict[str, torch.Tensor],
    which: Sequence[int],
    states: Sequence[Place],
    scalar_count: int,
    written: Sequence[Place],
) -> BodyCall:
    """The update as one call."""
    body = Body(graph, tensors, pointwise=False)
    scalars = tuple(range(scalar_count))
    return BodyCall(body, tuple(which), tuple(range(len(states))), scalars, tuple(written))


def split(update: BodyCall, states: Sequence[Place]) -> list[BodyCall] | None:
    """One call for each parameter; None where their updates are not independent of each other."""
    graph, which = update.body.graph, update.params
    holders = graph.find_nodes(op="placeholder")
    count = len(which)
    place_of: dict[Node, int] = {}
    for j in range(count):
        place_of[holders[j]] = place_of[holders[count + j]] = j
    position = {index: j for j, index in enumerate(which)}
    for holder, (where, index, _) in zip(holders[2 * count :], states, strict=False):
        if where == "state":
            place_of[holder] = position[index]
    (out,) = graph.find_nodes(op="output")
    results: list[list[Node]] = [[n] for n in out.args[0][:count]]
    written: list[list[Place]] = [[] for _ in which]
    for place, node in zip(update.written, out.args[0][count:], strict=True):
        if place[0] != "state":
            return None
        results[position[place[1]]].append(node)
        written[position[place[1]]].append(place)
    order = {node: i for i, node in enumerate(graph.nodes)}
    bodies: dict[str, Body] = {}
    calls = []
    for j in range(count):
        needed = upstream(results[j])
        if any(place_of.get(node, j) != j for node in needed):
            return None
        mine = [
            i for i, (where, index, _) in enumerate(states) if (where, index) == ("state", which[j])
        ]
        shared = [
            i
            for i, (where, _, _) in enumerate(states)
            if where == "group" and holders[2 * count + i] in needed
        ]
        first = 2 * count + len(states)
        scalars = [i for i in update.scalars if holders[first + i] in needed]
        inputs = [
            holders[j],
            holders[count + j],
            *(holders[2 * count + i] for i in (*mine, *shared)),
            *(holders[first + i] for i in scalars),
        ]
        nodes = sorted((n for n in needed if n.op != "placeholder"), key=order.__getitem__)
        pointwise = all(_is_pointwise(n, holders[j]) for n in (*inputs, *nodes))
        text = _text(inputs, nodes, results[j], update.body.tensors, pointwise)
        if text not in bodies:
            bodies[text] = Body(_copied(inputs, nodes, results[j]), update.body.tensors, pointwise)
        calls.append(
            BodyCall(bodies[text], (which[j],), (*mine, *shared), tuple(scalars), tuple(written[j]))
        )
    return calls


def _is_pointwise(node: Node, parameter: Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node.target is ITEM or not isinstance(node.target, OpOverload)
    if value.device != parameter.meta["val"].device and value.dim() > 0:
        return False
    if value.dim() > 0 and value.shape != parameter.meta["val"].shape:
        return False
    if node.op in ("placeholder", "get_attr"):
        return True
    tags = getattr(node.target, "tags", ())
    return node.target in _POINTWISE or (
        torch.Tag.pointwise in tags and torch.Tag.nondeterministic_seeded not in tags
    )


def _text(
    inputs: list[Node],
    nodes: list[Node],
    results: list[Node],
    tensors: dict[str, torch.Tensor],
    pointwise: bool,
) -> str:
    """Equal for two parameters exactly when one body serves both."""
    number = {node: i for i, node in enumerate((*inputs, *nodes))}
    lines = []
    for node in number:
        value = node.meta.get("val")
        form = form_of(value) if isinstance(value, torch.Tensor) else type(value).__name__
        if pointwise and isinstance(value, torch.Tensor):
            form = f"{value.dtype} {value.device} {value.dim() > 0}"
        args = torch.fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        constant = id(tensors[str(node.target)]) if node.op == "get_attr" else node.target
        lines.append(f"{node.op} {constant if node.op != 'placeholder' else ''} {args} {form}")
    return "\n".join([*lines, str([number[n] for n in results])])


def _copied(inputs: list[Node], nodes: list[Node], results: list[Node]) -> Graph:
    graph = Graph()
    env: dict[Node, Node] = {}
    for node in inputs:
        env[node] = graph.placeholder(node.name)
        env[node].meta.update(node.meta)
    for node in nodes:
        env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[n] for n in results))
    return graph
