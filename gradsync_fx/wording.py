"""Numbers and names as text for messages and reports: plurals, commas, function names."""

from __future__ import annotations

from typing import Any


def name_of(function: Any) -> str:
    """What a step is called in reports, profiles and traces: the function's own name, or its object's class."""
    return str(getattr(function, "__name__", type(function).__name__))


def number_of(number: int, one: str, many: str = "") -> str:
    """`1 rank`, `8 ranks`; large numbers with commas. many: the plural, where it is not `one` with an s."""
    return f"{number:,} {one if number == 1 else many or f'{one}s'}"
