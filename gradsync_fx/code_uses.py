"""What a function's code refers to by name: globals, names of the functions around it, attributes."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any


FROM_CELLS = ("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_CLOSURE")
TEXT = "TEXT"  # a constant of code that may be the name of an attribute


def uses(code: CodeType) -> Iterator[tuple[str, Any]]:
    """What code does with names: each instruction's name and argument, those of functions in it, and its texts."""
    for instruction in dis.get_instructions(code):
        yield instruction.opname, instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from uses(constant)
        elif isinstance(constant, str):
            yield TEXT, constant


def cells_of(function: FunctionType) -> dict[str, Any]:
    """The cells of a function's closure, by name."""
    return dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))


def globals_used(function: FunctionType) -> dict[str, Any]:
    """Globals that a function, and the functions in it, read; with their values now."""
    names = [name for op, name in uses(function.__code__) if op in ("LOAD_GLOBAL", "LOAD_NAME")]
    held = function.__globals__
    return {name: held[name] for name in dict.fromkeys(names) if name in held}


def names_around(function: FunctionType) -> dict[str, Any]:
    """Names of the functions around it that a function uses, with their values now; none that is not assigned yet."""
    found = {}
    for name, cell in cells_of(function).items():
        try:
            found[name] = cell.cell_contents
        except ValueError:
            continue
    return found
