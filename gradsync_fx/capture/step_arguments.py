"""Arguments of `optimizer.step(...)` in a trace: a closure, and constants, which the marker op carries as text."""

from __future__ import annotations

from typing import Any

from torch.optim import Optimizer

from gradsync_fx._torch import SymNodeVariable, TensorVariable
from gradsync_fx.capture.trace_state import is_none, refuse
from gradsync_fx.optim.opaque import text_of


def closure_of(args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments of a step, taken out of them; None where there is none."""
    found = kwargs.pop("closure", None)
    if (
        found is None
        and args
        and not isinstance(args[0].realize(), TensorVariable | SymNodeVariable)
    ):
        first = args[0]
        if is_none(first) or not first.is_python_constant() or callable(first.as_python_constant()):
            found = args.pop(0)
    return None if is_none(found) else found


def given_text(
    tx: Any, optimizer: Optimizer, args: list[Any], kwargs: dict[str, Any], *, used: bool
) -> str:
    """The other arguments of a step, and whether the user's code uses its result, as a text."""
    values = [*args, *kwargs.values()]
    text = None
    if all(v.is_python_constant() for v in values):
        named = {key: v.as_python_constant() for key, v in kwargs.items()}
        text = text_of((tuple(a.as_python_constant() for a in args), named, used))
    if text is None:
        refuse(
            tx,
            f"{type(optimizer).__name__}.step",
            seen="it is given an argument that is no constant of the step",
            wanted="numbers, strings and the like, written in the step",
            fix='set it on the optimizer before the call of the step; or pass on_unsupported="eager"',
        )
    return text
