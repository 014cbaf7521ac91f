"""Python floats of a step in its graph, as AOTAutograd has it: which stay numbers, and which become constants.

torch turns a float into a tensor where it meets one, and makes a constant of any other, with a trace for each value.
Floats that meet only each other (the running sum of a loss) can stay what they are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.fx import GraphModule, Node

from gradsync_fx._torch import (
    FakeTensorMode,
    SymT,
    detect_fake_mode,
    dynamo_exc,
    is_constant_number,
    note_constant_number,
    symbol_is_type,
    tensorify_module,
    tensorify_numbers,
)
from gradsync_fx._torch_aot import TensorReferenceAnalysis


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
        _hand_out_tensors(module, fakes)
        with _constants_made() as made, _remainders():
            tensorify_numbers(module)
        # It begins anew for what it found constant, but not for a number that is a tensor elsewhere.
        _begin_anew_for(made)


def _hand_out_tensors(module: GraphModule, fakes: FakeTensorMode) -> None:
    """What the step makes of a number (`self.beta *= 0.9`) is computed as a tensor, too, in float64."""
    graph = module.graph
    for node in list(graph.nodes):
        if node.kwargs.get("dtype") is not torch.float64 or not _handed_out(node):
            continue
        (number,) = node.args
        if not isinstance(number, Node) or not isinstance(number.meta.get("val"), torch.SymFloat):
            continue
        with graph.inserting_before(node), fakes:
            one = graph.call_function(node.target, (1.0,), {"dtype": torch.float64})
            one.meta["val"] = torch.scalar_tensor(1.0, dtype=torch.float64)
            product = graph.call_function(torch.ops.aten.mul.Tensor, (one, number))
            product.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(product)
        graph.erase_node(node)


@contextmanager
def _constants_made() -> Iterator[set[Any]]:
    """The symbols that `tensorify_numbers` makes constants of, inside."""
    made: set[Any] = set()
    plain: Any = vars(tensorify_module)["guard_scalar"]

    def noted(value: Any) -> Any:
        made.update(value.node.expr.free_symbols)  # none are left after it
        return plain(value)

    with mock.patch.object(tensorify_module, "guard_scalar", noted):
        yield made


@contextmanager
def _remainders() -> Iterator[None]:
    """`%` of numbers, which torch's pass has no tensors for (seen in 2.13), inside."""
    remainder = staticmethod(torch.ops.aten.remainder.Tensor)
    with (
        mock.patch.object(TensorReferenceAnalysis, "python_mod", remainder, create=True),
        mock.patch.object(TensorReferenceAnalysis, "mod", remainder),  # of what is not negative
    ):
        yield


def _begin_anew_for(constants: Iterable[Any]) -> None:
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
