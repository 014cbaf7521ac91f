"""Conditions on numbers, from torch's symbolic shapes, as functions of Python: sympy evaluates them far more slowly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule, Proxy

from gradsync_fx._torch import PlainArithmetic, sympy_interp


Numbers = list[int | float]


def as_function(condition: Any, symbols: list[Any]) -> Callable[[Numbers], bool]:
    """Whether a condition holds for these numbers, one for each symbol; in Python's own arithmetic."""
    try:
        function = _traced(condition, symbols)
    except Exception:  # arithmetic of torch's that takes numbers only, of any class of error

        def function(*numbers: int | float) -> Any:
            values = dict(zip(symbols, numbers, strict=True))
            return sympy_interp(PlainArithmetic, values, condition)

    return lambda numbers: bool(function(*numbers))


def _traced(condition: Any, symbols: list[Any]) -> Callable[..., Any]:
    """The same operators, written down once as code."""
    graph = Graph()
    holders = {s: Proxy(graph.placeholder(f"n{i}")) for i, s in enumerate(symbols)}
    result = sympy_interp(PlainArithmetic, holders, condition)
    graph.output(result.node)
    function: Callable[..., Any] = GraphModule({}, graph).forward
    return function
