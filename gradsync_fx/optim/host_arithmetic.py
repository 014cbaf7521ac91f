"""Cuts the arithmetic on Python numbers out of a traced update, for the host to do at each update."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradsync_fx._torch import OpOverload, tree_leaves
from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.ops import ITEM
from gradsync_fx.optim.subgraphs import Place


def split_host(
    traced: Graph, counts: tuple[int, ...], params: int, outs: list[tuple[Place, Any]]
) -> dict[str, Any]:
    """Cuts arithmetic on Python numbers out of the graph; what tensors need of it becomes a scalar input."""
    holders = traced.find_nodes(op="placeholder")
    carriers = set(holders[sum(counts[:3]) :])
    host_nodes: set[Node] = set()
    for node in traced.nodes:
        if node.op != "call_function":
            continue
        inputs = node.all_input_nodes
        if (
            node.target is ITEM
            and inputs[0] in carriers
            or inputs
            and all(n in host_nodes for n in inputs)
            and not _tensor_valued(node)
        ):
            host_nodes.add(node)
    (out,) = traced.find_nodes(op="output")
    flat_out = tree_leaves(out.args)
    ports: dict[Node, None] = {}
    for node in traced.nodes:
        if node.op == "call_function" and node not in host_nodes:
            for n in node.all_input_nodes:
                if n in host_nodes:
                    ports[n] = None
    number_out = [
        (place, v)
        for (place, _), v in zip(outs, flat_out[params:], strict=True)
        if v in host_nodes or not isinstance(v, Node)
    ]

    host = Graph()
    known: dict[Any, Node] = {}
    env: dict[Node, Any] = {
        h: host.placeholder(f"n{i}") for i, h in enumerate(holders[sum(counts[:3]) :])
    }
    for node in traced.nodes:
        if node in host_nodes:
            if node.target is ITEM:
                env[node] = env[node.all_input_nodes[0]]
                continue
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            value = (node.target, args, tuple(kwargs.items()))
            if value not in known:
                known[value] = host.node_copy(node, env.__getitem__)
            env[node] = known[value]
    values: dict[Node, Node] = {}
    for p in ports:
        values.setdefault(env[p], p)
    host.output(tuple(values) + tuple(env.get(v, v) for _, v in number_out))

    graph = Graph()
    inner: dict[Node, Node] = {}
    for i, h in enumerate(holders[: sum(counts[:3])]):
        inner[h] = graph.placeholder(f"t{i}")
        inner[h].meta.update(h.meta)
    carried = {v: graph.placeholder(f"s{i}") for i, v in enumerate(values)}
    read = {v: graph.call_function(ITEM, (holder,)) for v, holder in carried.items()}
    items = {p: read[env[p]] for p in ports}
    for node in traced.nodes:
        if node.op not in ("call_function", "get_attr") or node in host_nodes:
            continue
        if (
            node.target is torch.ops.aten.clone.default
            and node.args[0] in inner
            and node.args[0].op == "placeholder"
        ):
            inner[node] = inner[node.args[0]]
            continue
        inner[node] = graph.node_copy(node, lambda n: items[n] if n in items else inner[n])
    tensors_out = [
        (place, v)
        for (place, _), v in zip(outs, flat_out[params:], strict=True)
        if isinstance(v, Node) and v not in host_nodes
    ]
    graph.output(
        tuple(inner[n] for n in flat_out[:params]) + tuple(inner[v] for _, v in tensors_out)
    )
    graph.eliminate_dead_code()
    return {
        "graph": graph,
        "host": GraphModule({}, host),
        "scalar_count": len(values),
        "state_out": [place for place, _ in tensors_out],
        "number_out": [place for place, _ in number_out],
    }


def rigid_numbers(
    traced: Graph, tensors: int, numbers: list[tuple[list[Place], int | None]]
) -> frozenset[tuple[Place, int | None]]:
    """Numbers that scale a matrix product: compilers want constants there (coefficients, not schedules)."""
    carriers = traced.find_nodes(op="placeholder")[tensors:]
    feeding = upstream(
        value
        for target in (torch.ops.aten.addmm.default, torch.ops.aten.baddbmm.default)
        for node in traced.find_nodes(op="call_function", target=target)
        for value in node.kwargs.values()
        if isinstance(value, Node)
    )
    return frozenset(
        (place, part)
        for carrier, (places, part) in zip(carriers, numbers, strict=True)
        if carrier in feeding
        for place in places
    )


def _tensor_valued(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor) or isinstance(node.target, OpOverload)


def ties(condition: Any) -> bool:
    """Whether a condition holds for one value of its number only: an equality, and not of a remainder or the like."""
    return type(condition).__name__ == "Equality" and _forms(condition) <= _ONE_TO_ONE


_ONE_TO_ONE = {"Equality", "Add", "Mul", "ToFloat"}


def _forms(expression: Any) -> set[str]:
    inner = (_forms(part) for part in expression.args)
    return {type(expression).__name__, *set().union(*inner)} if expression.args else set()
