"""Handles `p.grad = g`: gradients of torch.func or torch.autograd.grad, or made by hand.

It counts like one of `backward()`: a marker stands where it is assigned. A value that is made of a marked gradient
(scaled, projected, clipped) and assigned again gets none: it is what the step does with the window's gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Node

from gradsync_fx._torch import InstructionTranslator, SideEffects, TensorVariable
from gradsync_fx.capture.trace_state import (
    call,
    const,
    is_none,
    line_here,
    line_of,
    no_grad,
    observed,
    real_tensors,
    refuse,
)
from gradsync_fx.ir import ops


_plain_store_attr = SideEffects.store_attr


def store_attr(self: Any, item: Any, name: str, value: Any, *kind: Any) -> None:
    """`SideEffects.store_attr` while a step is traced: an attribute is set."""
    if name == "grad" and isinstance(item, TensorVariable) and isinstance(value, TensorVariable):
        value = _marked(InstructionTranslator.current_tx(), item, value)
    elif getattr(item, "source", None) is not None:
        tx = InstructionTranslator.current_tx()
        seen, place = observed().in_graph(tx.output), f"{item.source.name}.{name}"
        seen.lines[place], seen.set_after[place] = line_here(), seen.updates
    if name == "grad" and is_none(value):
        seen = observed()
        seen.in_graph(InstructionTranslator.current_tx().output).zeroed = True
    _plain_store_attr(self, item, name, value, *kind)


def _marked(tx: Any, item: Any, value: Any) -> Any:
    real = next((real for real, var in real_tensors(tx) if var is item), None)
    observed().in_graph(tx.output)
    if not isinstance(real, nn.Parameter) or _has_marker(value.as_proxy().node):
        return value
    seen = observed()
    if seen.demanded and all(real is not parameter for parameter in seen.demanded):
        return const(None)
    seen.assigned.append((value, _version(value), line_of(tx)))
    with no_grad(tx):
        return call(tx, ops.LEAF_GRAD, value, const(seen.leaf_index(real)))


def check_assigned(tx: Any) -> None:
    """Refuses a step that changes a gradient in place under another name after its assignment."""
    for value, version, line in observed().assigned:
        if _version(value) != version:
            refuse(
                tx,
                "a gradient",
                where=line,
                seen="it is assigned to .grad here, and changed in place later under its first name",
                wanted="gradients that are changed through .grad",
                fix="change p.grad itself, or assign it when it is done",
            )


def _version(value: Any) -> int:
    found: torch.Tensor = value.as_proxy().node.meta["example_value"]
    return found._version


def _has_marker(node: Node) -> bool:
    """Whether a value is made of a gradient that has its marker."""
    known = observed().made_of_gradients
    stack = [node]
    while stack:
        top = stack[-1]
        waiting = [n for n in top.all_input_nodes if n not in known]
        if top in known or not waiting:
            stack.pop()
            known.setdefault(
                top,
                top.target is ops.LEAF_GRAD or any(known[n] for n in top.all_input_nodes),
            )
        else:
            stack += waiting
    return known[node]
