"""Collectives of torch.distributed in a trace: they write their argument in place, unseen by autograd as in eager.

dist.all_reduce(x)      x is reduced, and its gradient passes as if it had not been; so for all-gathers and others

Left alone, torch would trace a functional collective that has a gradient.
"""

from __future__ import annotations

from typing import Any

from gradsync_fx._torch import CollectiveFunctionRewriteVariable
from gradsync_fx.capture.trace_state import line_of, no_grad, observed, refuse


def call_collective(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`CollectiveFunctionRewriteVariable.call_function` while a step is traced."""
    observed().in_graph(tx.output).in_place.append(f"{self.fn.__name__} at {line_of(tx)}")
    with no_grad(tx):
        return _plain_call(self, tx, args, kwargs)


_plain_call = CollectiveFunctionRewriteVariable.call_function


def refuse_overwritten(tx: Any, failure: Exception) -> None:
    """Ends the trace where `backward` failed as a collective had overwritten what it needs."""
    lines = observed().in_place
    if lines and "modified by an inplace operation" in str(failure):
        refuse(
            tx,
            "loss.backward",
            seen="it needs a value that was overwritten in place, unseen by autograd: by one of these collectives, "
            f"perhaps: {', '.join(lines)}",
            wanted="values that stay as they were until the backward has read them",
            fix="reduce a copy (x = x.clone(); dist.all_reduce(x)); eager PyTorch computes with the overwritten value",
        )
