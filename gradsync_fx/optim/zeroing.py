"""`zero_grad` of the user's own: what torch's does, and something beside it (a count, a cache that is cleared).

Gradients are dropped on every call, as torch's own method drops them; the user's method runs once per update, after
it, as a scheduler's step does. There are no gradients by then: a method that reads them is refused.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from itertools import pairwise
from types import CodeType, FunctionType
from typing import Any

from torch import nn

from gradsync_fx.code_uses import TEXT, uses
from gradsync_fx.errors import CaptureError
from gradsync_fx.user_lines import OURS, TORCHS


NAME = "zero_grad"
# What torch's own method, and those that are written after it, do with a gradient: it ends as None or zeros.
_CLEARS = frozenset(("zero_", "detach_", "requires_grad_", "grad_fn"))
_READS = frozenset(("clip_grad_norm_", "clip_grad_value_", "get_total_norm"))


def method_of(owner: Any) -> Any:
    """The function behind the `zero_grad` of an optimizer or a module."""
    found = vars(owner).get(NAME) or getattr(type(owner), NAME)
    return inspect.unwrap(getattr(found, "__func__", found))


def is_own(method: Any) -> bool:
    """Whether such a function is not torch's."""
    code = _code(inspect.unwrap(method))
    return code is None or not code.co_filename.startswith((TORCHS, OURS))


def own_among(roots: Iterable[tuple[str, nn.Module]]) -> list[nn.Module]:
    """The modules in these whose `zero_grad` is not torch's."""
    every = dict.fromkeys(module for _, root in roots for module in root.modules())
    return [module for module in every if is_own(method_of(module))]


def why_not_later(owner: Any, method: Any) -> CaptureError | None:
    """The error where a `zero_grad` of the user's own may not wait until gradients are gone."""
    line = next(_reads(owner, inspect.unwrap(method), set()), None)
    if line is None:
        return None
    return CaptureError(
        f"{type(owner).__name__}.{NAME}",
        seen=f"it reads gradients, at {line}; it runs once per update and after it, where there are none",
        wanted="a zero_grad that drops gradients, and does what it does beside that without them",
        fix="read gradients in the step, between backward() and optimizer.step(): there they are the window's",
    )


def _code(function: Any) -> CodeType | None:
    return getattr(function, "__code__", None)


def _reads(owner: Any, function: Any, seen: set[CodeType]) -> Iterator[str]:
    """The lines where this function, or one of the user's that it names, looks at a gradient's value."""
    code = _code(function)
    if code is None or code in seen or code.co_filename.startswith((TORCHS, OURS)):
        return
    seen.add(code)
    steps = [(op, name) for op, name in uses(code) if op not in ("CACHE", "EXTENDED_ARG")]
    for (op, name), (then, what) in pairwise([*steps, ("", None)]):
        if name in _READS or (name == "grad" and op in (TEXT, "LOAD_ATTR", "LOAD_METHOD")):
            asked = "NONE" in then or (then == "LOAD_CONST" and what is None) or what in _CLEARS
            if not asked:
                yield f"{code.co_filename}:{code.co_firstlineno}"
        if isinstance(name, str):
            named = function.__globals__.get(name), getattr(type(owner), name, None)
            for inner in named:
                if isinstance(inner, FunctionType):
                    yield from _reads(owner, inner, seen)
