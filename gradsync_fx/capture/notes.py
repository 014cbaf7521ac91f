"""Values of a step that a trace points out to the passes: `note` ops, a chain of them in the graph (ir/ops.py)."""

from __future__ import annotations

from typing import Any

import torch

from gradsync_fx._torch import TensorVariable, TupleVariable
from gradsync_fx.capture.trace_state import call, const, no_grad, observed
from gradsync_fx.ir import ops
from gradsync_fx.ir.ops import Role


def note(tx: Any, value: Any, role: Role, index: int = 0) -> None:
    """Marks a tensor for the passes: a `note` op in the graph."""
    seen = observed().in_graph(tx.output)
    with no_grad(tx):
        if seen.chain is None:
            seen.chain = call(tx, torch.zeros, const(0))
        seen.chain = call(tx, ops.NOTE, seen.chain, value, const(int(role)), const(index))


def note_norm(tx: Any, norm: Any) -> None:
    """What `clip_grad_norm_` returned, for the host: whoever watches updates asks for it."""
    seen = observed().in_graph(tx.output)
    if seen.norms is not None and isinstance(norm, TensorVariable):
        index = seen.host_values
        with no_grad(tx):
            note(tx, norm.call_method(tx, "detach", [], {}), Role.HOST, index)
        seen.norms.append(index)


def as_tensor(tx: Any, value: Any) -> Any:
    """A tensor, or a number as one, detached."""
    if not isinstance(value, TensorVariable):
        # Added, not filled in: a fill would make a constant of a number that changes with every call.
        zero = call(tx, torch.zeros, TupleVariable([]), dtype=const(torch.float64))
        value = zero.call_method(tx, "add", [value], {})
    return value.call_method(tx, "detach", [], {})
