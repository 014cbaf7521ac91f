"""What the user calls a value of the step: from Dynamo's expression for it, which starts at our own wrapper.

L['args'][1]['x'] -> batch.x        L['function'].__closure__[0].cell_contents -> net
L['kwargs']['mask'] -> mask         L['function'].__self__.scale               -> self.scale
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from operator import attrgetter
from typing import Any

from gradsync_fx.capture.trace_state import readable


_GIVEN = re.compile(r"^L\['args'\]\[(\d+)\]")
_BY_NAME = re.compile(r"^L\['kwargs'\]")
_ENCLOSED = re.compile(r"^L\['function'\]([.\w]*)\.__closure__\[(\d+)\]\.cell_contents")
_OWNER = re.compile(r"^L\['function'\]\.__self__")


def users_name(source: str, function: Callable[..., Any] | None) -> str:
    """The name of a value of `function`, the user's step where it is known; parts of a value after a dot."""
    if function is None:
        return readable(source)
    if given := _GIVEN.match(source):
        return readable(_argument(function, int(given[1])) + source[given.end() :])
    if by_name := _BY_NAME.match(source):
        return readable(source[by_name.end() :])
    if enclosed := _ENCLOSED.match(source):
        name = _free_variable(function, enclosed[1].lstrip("."), int(enclosed[2]))
        return readable(source) if name is None else readable(name + source[enclosed.end() :])
    return readable(_OWNER.sub("self", source))


def _argument(function: Callable[..., Any], position: int) -> str:
    """`batch`; `rest[1]` for one of several that go into `*rest`."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return f"args[{position}]"
    for number, parameter in enumerate(parameters[: position + 1]):
        if parameter.kind is inspect.Parameter.VAR_POSITIONAL:
            return f"{parameter.name}[{position - number}]"
    return parameters[position].name if position < len(parameters) else f"args[{position}]"


def _free_variable(function: Callable[..., Any], path: str, number: int) -> str | None:
    try:
        owner = attrgetter(path)(function) if path else function
        names: tuple[str, ...] = owner.__code__.co_freevars
    except AttributeError:
        return None
    return names[number] if number < len(names) else None
