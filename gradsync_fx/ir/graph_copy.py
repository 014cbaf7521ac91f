"""Copies of graphs, and modules round them, at the price of the nodes: programs have tens of thousands.

torch looks through the arguments of each new node for symbolic numbers, which takes longer than all else; here they
come from nodes. And a module writes and compiles its Python code whenever its graph changes; here, when somebody reads
or runs it: most compilers do neither.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.fx import Graph, GraphModule, Node, map_arg

from gradsync_fx._torch import lazy_graph_modules, make_graph_module


def copy_nodes(source: Graph, into: Graph, of: dict[Node, Node]) -> Any:
    """Copies all nodes but the output; returns what that would give. of: source to copy; grows.

    Metadata is copied one level deep.
    """
    for node in source.nodes:
        if node.op == "output":
            return map_arg(node.args[0], of.__getitem__)
        made = into.create_node(node.op, node.target, name=node.name, type_expr=node.type)
        give_arguments(made, *map_arg((node.args, node.kwargs), of.__getitem__))
        made.meta.update(node.meta)
        of[node] = made
    raise AssertionError("a graph without an output")


def new_call(graph: Graph, target: Callable[..., Any], args: Any, kwargs: Any) -> Node:
    """A node at the insertion point. args, kwargs: of nodes and plain constants."""
    made = graph.create_node("call_function", target)
    give_arguments(made, args, kwargs)
    return made


def give_arguments(node: Node, args: Any, kwargs: Any) -> None:
    """Gives a new node its arguments, of nodes and plain constants."""
    # Past the node's own `__setattr__`, which also enters it anew into its graph's table of targets.
    if args:
        object.__setattr__(node, "args", args)
    if kwargs:
        object.__setattr__(node, "kwargs", kwargs)


def module_of(root: nn.Module | dict[str, Any], graph: Graph) -> GraphModule:
    """A module that runs this graph, over the tensors and submodules of `root` that it names."""
    with lazy_graph_modules(True):
        return make_graph_module(root, graph)
