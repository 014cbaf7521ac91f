"""Conditions as functions hold where sympy says that they do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import sympy  # type: ignore[import-untyped]
from torch.utils._sympy.functions import FloorDiv, Max, Min, Mod, ToFloat

from gradsync_fx.optim import conditions
from gradsync_fx.optim.conditions import as_function


A, B = sympy.Symbol("zf0", real=True), sympy.Symbol("s1", integer=True, nonnegative=True)
NUMBERS = list(itertools.product((-1.5, 0.0, 0.25, 0.999, 4.0), (0, 1, 3, 8)))
CONDITIONS = [
    sympy.Ne(A, 0.0),
    sympy.Ge(A, 0.0),
    sympy.Lt(1.0 - A, 0.5),
    sympy.Gt(1.0 - A**2, -0.5),
    sympy.Eq(Mod(B, 2), 1),
    sympy.Eq(ToFloat(B) * 0.5, 1.5),
    sympy.Gt(FloorDiv(B, 3), 1),
    sympy.Le(Max(B, 3) + Min(B, 2), 5),
    sympy.And(A > 0.0, B > 1),
    sympy.Or(A > 0.0, B > 1),
    sympy.Not(sympy.And(A > 0.0, B > 1)),
]


def by_sympy(condition: Any, numbers: tuple[float, int]) -> bool:
    return bool(condition.subs({A: numbers[0], B: numbers[1]}))


@pytest.mark.parametrize("condition", CONDITIONS, ids=str)
def test_a_function_says_what_the_condition_says(condition: Any) -> None:
    holds = as_function(condition, [A, B])
    told = [holds(list(numbers)) for numbers in NUMBERS]
    assert told == [by_sympy(condition, numbers) for numbers in NUMBERS]
    assert {True, False} == set(told)


def test_what_is_true_at_all_times_is() -> None:
    assert as_function(sympy.true, [A, B])([1.0, 2])


def test_arithmetic_that_takes_numbers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed as it was: slower, and the same."""

    def no_code(condition: Any, symbols: list[Any]) -> Any:
        raise TypeError("a Proxy is no number")

    monkeypatch.setattr(conditions, "_traced", no_code)
    for condition in CONDITIONS:
        holds = as_function(condition, [A, B])
        assert [holds(list(n)) for n in NUMBERS] == [by_sympy(condition, n) for n in NUMBERS]
