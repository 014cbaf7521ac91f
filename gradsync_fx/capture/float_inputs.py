"""Python floats of a step in its graph, as AOTAutograd has it: which stay numbers, and which become constants.

torch turns a float into a tensor where it meets one, and makes a constant of any other, with a trace for each value.
Floats that meet only each other (the running sum of a loss) can stay what they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx._torch import (
    SymT,
    detect_fake_mode,
    dynamo_exc,
    is_constant_number,
    note_constant_number,
    symbol_is_type,
    tensorify_numbers,
)


def keep_floats(module: GraphModule) -> None:
    """`_apply_tensorify_python_scalars` while a step is traced."""
    fakes = detect_fake_mode()
    if fakes is None or fakes.shape_env is None:
        return
    env = fakes.shape_env
    _begin_anew_for(_lost(module, env))
    met = (
        a.meta.get("val")
        for node in module.graph.nodes
        for a in node.all_input_nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and not _handed_out(node)
    )
    if any(isinstance(value, torch.SymFloat) for value in met):
        tensorify_numbers(module)
        # It begins anew for what it found constant, but not where another op could take the same number as a tensor.
        replaced = env.replacements
        _begin_anew_for([s for s in _floats(env) if getattr(replaced.get(s), "is_number", False)])


def _begin_anew_for(constants: list[Any]) -> None:
    """The next attempt of the trace knows these symbols for constants, and guards on them."""
    names = [str(symbol) for symbol in constants if not is_constant_number(str(symbol))]
    for name in names:
        note_constant_number(name)
    if names:
        raise dynamo_exc.TensorifyScalarRestartAnalysis


def _floats(env: Any) -> list[Any]:
    return [symbol for symbol in env.backed_var_to_val if symbol_is_type(symbol, SymT.FLOAT)]


def _lost(module: GraphModule, env: Any) -> list[Any]:
    """Floats of which nothing is left in the graph: an op that takes Python's (`torch.lerp`) has their values."""
    used = set()
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if node.users and isinstance(value, torch.SymFloat | torch.SymInt | torch.SymBool):
            used |= value.node.expr.free_symbols
    return [symbol for symbol in _floats(env) if symbol not in used]


def _handed_out(node: Node) -> bool:
    """A number that the program returns, in the tensor that Dynamo has it returned in."""
    only_output = all(user.op == "output" for user in node.users)
    return node.target is torch.ops.aten.scalar_tensor.default and only_output
