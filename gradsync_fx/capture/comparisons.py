"""Comparisons of numbers that are symbols of a trace: their outcome is known at once, and guarded on.

Dynamo's variable for an outcome that it leaves open is no bool of Python's: it is neither `True` nor `False`, is no
index, and a sum of several is wrong. Outcomes of numbers that only the program knows stay open.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gradsync_fx._torch import SymNodeVariable, compare_op_handlers, free_unbacked_symbols
from gradsync_fx.capture.trace_state import const, observed


Compare = Callable[[Any, Any, Any], Any]


def decided(found: Any) -> Any:
    """A constant for the outcome of a comparison; any other variable as it is."""
    if not isinstance(found, SymNodeVariable) or found.python_type() is not bool:
        return found
    if free_unbacked_symbols(found.sym_num):
        return found
    seen = observed()
    expression = found.sym_num.node.expr
    seen.compared_after.update(dict.fromkeys(expression.free_symbols, seen.updates))
    return const(found.evaluate_expr())


def deciding() -> dict[str, Compare]:
    """Dynamo's `compare_op_handlers` while a step is traced."""
    return {name: _deciding(name, plain) for name, plain in compare_op_handlers.items()}


def _deciding(name: str, plain: Compare) -> Compare:
    def compare(tx: Any, operands: Any, options: Any) -> Any:
        return decided(plain(tx, [decided(one) for one in operands], options))

    def identity(tx: Any, operands: Any, options: Any) -> Any:
        return plain(tx, [_value(one) for one in operands], options)

    return identity if name.startswith("is") else compare


def _value(found: Any) -> Any:
    """A bool that is open has no identity yet: where only the program knows it, the trace ends, as at a branch."""
    is_open = isinstance(found, SymNodeVariable) and found.python_type() is bool
    return const(found.evaluate_expr()) if is_open else found
