"""Boundary and tail: the traced update in place of each `update` marker.

update(h, which, params, grads) -> params'     becomes the optimizer's own graph; its state tensors and host scalars
                                               become inputs, and its new state becomes writes
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.draft import Draft
from gradsync_fx.ops import ITEM, argument
from gradsync_fx.plan import Plan
from gradsync_fx.program import Kind, Slot


def update_key(node: Node) -> str:
    """Names one update of a step: the node's place among its updates is stable under copying."""
    return node.name


def inline_updates(draft: Draft, plan: Plan) -> None:
    """Copies each traced update into the program. Names of state slots tell optimizer, parameter and key."""
    for step_node in plan.regions.updates:
        if plan.is_open([step_node]):
            continue
        marker = draft.of[step_node]
        key = update_key(step_node)
        update = plan.updates[key]
        params, grads = list(argument(marker, 2)), list(argument(marker, 3))
        label = type(update.optimizer).__name__
        inputs: list[Any] = [*params, *grads]
        for i, (place, tensor) in enumerate(
            zip(update.states, plan.state_tensors[key], strict=True)
        ):
            slot = Slot(Kind.STATE, f"{label}[{place[1]}].{place[2]}", (key, i))
            inputs.append(draft.input(slot, tensor))
        for i in range(update.scalar_count):
            # One tensor for each: equal tensors would share one fake value, and that one symbol.
            form = torch.empty((), dtype=torch.float64)
            inputs.append(draft.input(Slot(Kind.SCALAR, f"{label} scalar {i}", (key, i)), form))
        held = dict(zip(update.states, inputs[len(params) + len(grads) :], strict=False))
        results = _inline(draft, marker, update, inputs)
        new_params, new_state = results[: len(params)], results[len(params) :]
        for item in list(marker.users):
            item.replace_all_uses_with(new_params[argument(item, 1)])
        for place, value in zip(update.state_out, new_state, strict=True):
            if place in held:
                draft.write(held[place], value)
            else:
                draft.set_outputs([*draft.outputs(), value])


def _inline(draft: Draft, marker: Node, update: Any, inputs: list[Node]) -> list[Node]:
    env: dict[Node, Any] = dict(zip(update.graph.find_nodes(op="placeholder"), inputs, strict=True))
    with draft.graph.inserting_before(marker):
        for node in update.graph.nodes:
            if node.op == "get_attr":
                name = f"_{marker.name}_{node.target}"
                draft.module.register_buffer(name, update.tensors[node.target])
                env[node] = draft.graph.get_attr(name)
                env[node].meta["val"] = draft.fake_mode.from_tensor(update.tensors[node.target])
            elif node.op == "call_function":
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = _known(draft, node, args, kwargs)
    (out,) = update.graph.find_nodes(op="output")
    return [env[n] for n in out.args[0]]


def _known(draft: Draft, node: Node, args: Any, kwargs: Any) -> Node:
    """A call whose form the trace knows already; only what reads a host scalar is computed again."""
    value = node.meta.get("val")
    target: Any = node.target
    if node.target is ITEM or not isinstance(value, torch.Tensor):
        return draft.call(target, *args, **kwargs)
    with draft.fake_mode:
        form = torch.empty_strided(
            value.shape, value.stride(), dtype=value.dtype, device=value.device
        )
    return draft.call_known(form, target, *args, **kwargs)
