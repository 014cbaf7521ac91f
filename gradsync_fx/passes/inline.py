"""Bodies of updates, put into the graph that calls them: for compilers that want plain ATen."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.ops import ITEM, argument
from gradsync_fx.passes.rewritten import Rewritten


def inline_bodies(rewritten: Rewritten) -> None:
    """Replaces every call of a submodule by the submodule's nodes; host scalars are read once each."""
    module, fake_mode = rewritten.main, rewritten.fake_mode
    known: dict[Any, Node] = {}
    for node in module.graph.find_nodes(op="call_module"):
        body = module.get_submodule(str(node.target))
        assert isinstance(body, GraphModule)
        with module.graph.inserting_before(node):
            results = copy_body(module, body, list(node.args), fake_mode, known, str(node.target))
        for item in list(node.users):
            item.replace_all_uses_with(results[argument(item, 1)])
            module.graph.erase_node(item)
        module.graph.erase_node(node)
    module.delete_all_unused_submodules()
    module.recompile()


def copy_body(
    into: GraphModule,
    body: GraphModule,
    inputs: list[Any],
    fake_mode: Any,
    known: dict[Any, Node],
    label: str,
) -> list[Node]:
    """The nodes of a body at the insertion point. known: numbers that are there already, by how they are made."""
    env: dict[Node, Any] = dict(zip(body.graph.find_nodes(op="placeholder"), inputs, strict=True))
    for node in body.graph.nodes:
        if node.op == "get_attr":
            name = f"_{label}_{node.target}"
            tensor = getattr(body, str(node.target))
            into.register_buffer(name, tensor)
            env[node] = into.graph.get_attr(name)
            env[node].meta["val"] = fake_mode.from_tensor(tensor)
        elif node.op == "call_function":
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
            made = (node.target, args, tuple(kwargs.items()))
            number = node.target is ITEM or not isinstance(node.meta.get("val"), torch.Tensor)
            if number and made in known:
                env[node] = known[made]
                continue
            env[node] = emit(into.graph, fake_mode, node.target, args, kwargs)
            if number:
                known[made] = env[node]
    (out,) = body.graph.find_nodes(op="output")
    return [env[n] for n in out.args[0]]
