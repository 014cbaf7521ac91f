"""Rematerialization of checkpointed regions: their values are computed again where backward reads them.

forward    a = f(x)   b = g(a)   c = h(b)          a, b inside of `checkpoint`, c its output
backward   reads a, b                              a', b' = f(x), g(a) again, right before their first reader

torch tags the nodes of a region while it traces; `rematerialize` acts on the tags. It replaces torch's own pass for
graphs of forward and backward, which handles one backward only and no random ops. Values that are kept, because they
are live anyway or must not be made twice:

leaving      an output of the region; eager keeps it as well, for its uses outside
random       the op that draws, and a narrower value that comes from it alone (the mask of a dropout): all uses
             see the numbers that were drawn once
effects      collectives, asserts, numbers read by the host
policy       whatever a selective policy saves
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch.fx import GraphModule, Node, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from gradsync_fx._torch import functorch_config, tree_map_only
from gradsync_fx.errors import CaptureError
from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.memory import aliased


_CHECKPOINT = torch.ops.higher_order.tag_activation_checkpoint
_AGAIN = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def torch_pass_off() -> AbstractContextManager[Any]:
    """AOTAutograd without its own pass for checkpointed regions."""
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    return (
        functorch_config.patch({name: False}) if hasattr(functorch_config, name) else nullcontext()
    )


def refuse_reentrant(module: GraphModule) -> None:
    """Raises `CaptureError` for a checkpoint of the reentrant kind in Dynamo's graph, nested ones included.

    The reentrant kind gives a region no gradient when no input requires one; torch would trace it as the other kind.
    """
    for inner in module.modules():
        if not isinstance(inner, GraphModule):
            continue
        for node in inner.graph.find_nodes(op="call_function", target=_CHECKPOINT):
            if node.kwargs.get("use_reentrant") is not False:
                raise CaptureError(
                    f"torch.utils.checkpoint at {ops.node_line(node)}",
                    seen=f"use_reentrant={node.kwargs.get('use_reentrant', 'None, which means True')}: "
                    "a backward inside of backward, which cannot be traced",
                    wanted="checkpoints of the other kind",
                    fix="pass use_reentrant=False to checkpoint()",
                )


def rematerialize(module: GraphModule) -> None:
    """Replaces the uses in each backward by copies that are computed there. Forward nodes may end up without uses."""
    again = _computed_again(module)
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    copies: dict[Node, Node] = {}
    for reader in order:
        if not _backward(reader):
            copies = {}  # another backward computes its own
            continue
        missing = again - copies.keys()  # values that stay end the search
        needed = upstream([reader], through=missing.__contains__) - {reader}
        for node in sorted(needed, key=order.__getitem__):
            with module.graph.inserting_before(reader):
                copies[node] = module.graph.node_copy(node, partial(_replaced, copies))
            copies[node].meta["autograd_backward"] = True
            copies[node].meta["val"] = _own_value(copies[node])
        reader.args = map_arg(reader.args, partial(_replaced, copies))
        reader.kwargs = map_arg(reader.kwargs, partial(_replaced, copies))
    module.graph.lint()
    module.recompile()


def _replaced(copies: dict[Node, Node], node: Node) -> Node:
    return copies.get(node, node)


def _own_value(copy: Node) -> Any:
    """The fake value of what is computed again: memory of its own, and a view is one of its own source.

    What shared a storage with the forward's value would be an alias of it to compilers.
    """
    if aliased(copy.target) is not None:
        target: Any = copy.target
        args, kwargs = map_arg((copy.args, copy.kwargs), lambda n: n.meta["val"])
        return target(*args, **kwargs)
    return tree_map_only(
        torch.Tensor, lambda t: t.new_empty_strided(t.size(), t.stride()), copy.meta["val"]
    )


def _backward(node: Node) -> bool:
    return bool(node.meta.get("autograd_backward", False))


def _computed_again(module: GraphModule) -> set[Node]:
    again: set[Node] = set()
    drawn: set[Node] = set()
    for node in module.graph.nodes:
        if node.meta.get("recompute") not in _AGAIN or _backward(node):
            continue
        if _random(module, node) or (drawn.issuperset(node.all_input_nodes) and _narrows(node)):
            drawn.add(node)
        elif not (_leaves(node) or _has_effect(node)):
            again.add(node)
    return again


def _leaves(node: Node) -> bool:
    region = node.meta.get("ac_graph_id")
    return any(u.meta.get("ac_graph_id") != region and not _backward(u) for u in node.users)


def _has_effect(node: Node) -> bool:
    if node.target in (ops.WAIT, ops.ITEM) or ops.is_collective(node):
        return True
    return node.is_impure(impure_random=False)


def _random(module: GraphModule, node: Node) -> bool:
    """Draws random numbers, itself or in a graph that it is given. Attention does with a dropout_p above 0 only."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded in getattr(target, "tags", ()):
        for i, argument in enumerate(target._schema.arguments):
            if argument.name == "dropout_p":
                given = node.args[i] if i < len(node.args) else argument.default_value
                return bool(node.kwargs.get("dropout_p", given) != 0)
        return True
    graphs = [
        getattr(module, str(n.target), None) for n in node.all_input_nodes if n.op == "get_attr"
    ]
    return any(_random(g, n) for g in graphs if isinstance(g, GraphModule) for n in g.graph.nodes)


def _narrows(node: Node) -> bool:
    """One of its input's results, or of a smaller dtype. (Dtypes, as sizes may be symbols.)"""
    if node.target is operator.getitem:
        return True
    if len(node.all_input_nodes) != 1:
        return False
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    return (
        isinstance(source, torch.Tensor)
        and isinstance(result, torch.Tensor)
        and result.dtype.itemsize < source.dtype.itemsize
    )
