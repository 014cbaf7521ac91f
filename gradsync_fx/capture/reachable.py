"""Object reachability: the modules, optimizers and tensors that a function's arguments and names lead to.

A trace meets these objects as it goes; an eager run has to know them before: their gradients, process group, buffers.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync_fx.capture.trace_state import Observed, outermost
from gradsync_fx.code_uses import cells_of, globals_used, names_around, uses
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.user_lines import is_library


MANY = 4096  # items of a list: beyond them, it is data
DEPTH = 6  # links from an argument to an object: trainer.state.model.optimizers["a"] has 4


@dataclass(slots=True)
class Found:
    """Objects in the order of their discovery; all but optimizers with the path that leads to them. owners: what may
    hold a tensor by a name or an index, but for containers among the arguments, which are other ones in each call."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    pipelines: list[tuple[str, object]] = field(default_factory=list)
    owners: list[Any] = field(default_factory=list)

    def observed(self) -> Observed:
        """As a trace would have noted it."""
        return Observed(
            modules=list(self.modules),
            within_reach=self.roots(),
            optimizers=list(self.optimizers),
        )

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The outermost modules, those that an optimizer here trains first."""
        trained = {id(p) for o in self.optimizers for p in parameters_of(o)}

        def idle(named: tuple[str, nn.Module]) -> bool:
            return all(id(p) not in trained for p in named[1].parameters())

        return sorted(outermost(self.modules), key=idle)


def discover(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Found:
    """Everything within `DEPTH` links of the function's arguments, closure, globals and `self`."""
    found, seen = Found(), set[int]()
    queue = deque([*_arguments(function, args, kwargs), ("", function, 0)])
    methods = _Methods(_code_of(function))
    while queue or methods.collect(queue):
        path, value, depth = queue.popleft()
        if id(value) in seen or depth > DEPTH:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found.modules.append((path, value))
        elif isinstance(value, Optimizer):
            found.optimizers.append(value)
        elif type(value).__module__.startswith("torch.distributed.pipelining"):
            found.pipelines.append((path, value))
        elif isinstance(value, torch.Tensor):
            if value.requires_grad and value.is_leaf:
                found.tensors[path] = value
            continue
        found.owners += _owners(value, given=depth == 0)
        methods.saw(path, value, depth)
        for name, inner in _links(value):
            queue.append((f"{path}.{name}" if path else name, inner, depth + 1))
    for optimizer in found.optimizers:
        for i, p in enumerate(parameters_of(optimizer)):
            found.tensors.setdefault(f"{type(optimizer).__name__}.{i}", p)
    return found


class _Methods:
    """What classes of the user's own define for the objects met, under names that the functions met use."""

    def __init__(self, own: CodeType | None) -> None:
        """own: the code of the step itself, which its class may hold, too: decorated, or the original of a copy."""
        self._own = own
        self._names = {"forward", "__call__"}  # these are used without their names
        self._objects: list[tuple[str, Any, int]] = []
        self._collected = 0  # entries of the latest time: equal, there is nothing new

    def saw(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, FunctionType):
            self._names.update(_attributes(value))
        elif any(map(_is_users_own, type(value).__mro__)):
            self._objects.append((path, value, depth))

    def collect(self, queue: deque[tuple[str, Any, int]]) -> bool:
        """Puts them into the queue, whenever it is empty; whether it is no longer."""
        for path, value, depth in self._objects:
            for cls in filter(_is_users_own, type(value).__mro__):
                for name, entry in vars(cls).items():
                    if name in self._names and (self._own is None or _code_of(entry) != self._own):
                        entry = entry.fget if isinstance(entry, property) else entry
                        queue.append((f"{path}.{name}" if path else name, entry, depth + 1))
        before, self._collected = self._collected, len(queue)
        return before != len(queue)


def _code_of(function: Any) -> CodeType | None:
    plain = inspect.unwrap(getattr(function, "__func__", function))
    return getattr(plain, "__code__", None)


def _arguments(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Iterator[tuple[str, Any, int]]:
    bound = inspect.signature(function).bind(*args, **kwargs)
    for name, value in bound.arguments.items():
        yield name, value, 0


def _links(value: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds, as far as a step may reach it."""
    if isinstance(value, Mapping):
        yield from ((str(key), inner) for key, inner in islice(value.items(), MANY))
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((str(i), inner) for i, inner in enumerate(islice(value, MANY)))
    elif isinstance(value, functools.partial):
        yield from (("func", value.func), ("args", value.args), ("keywords", value.keywords))
    elif isinstance(value, MethodType):
        yield from (("", value.__self__), ("", value.__func__))
    elif isinstance(value, FunctionType):
        yield from _of_function(value)
    elif isinstance(value, nn.Module):
        # A module's own parts are named by itself; other objects that it keeps (an optimizer, say) are not.
        kept = ("_parameters", "_buffers", "_modules")
        yield from ((n, v) for n, v in vars(value).items() if n not in kept)
    elif isinstance(value, LRScheduler):
        yield "optimizer", value.optimizer
    elif not isinstance(value, Optimizer | type | ModuleType | BuiltinFunctionType):
        yield from getattr(value, "__dict__", {}).items()
        for cls in type(value).__mro__:
            for name, entry in vars(cls).items():
                if isinstance(entry, MemberDescriptorType) and hasattr(value, name):
                    yield name, getattr(value, name)  # a slot


def _owners(value: Any, *, given: bool) -> list[Any]:
    if isinstance(value, FunctionType):
        return [*cells_of(value).values(), *([value.__globals__] if globals_used(value) else [])]
    if isinstance(value, dict | list):
        return [] if given or len(value) > MANY else [value]
    kinds = (Optimizer, LRScheduler, type, ModuleType, BuiltinFunctionType, MethodType)
    return [value] if hasattr(value, "__dict__") and not isinstance(value, kinds) else []


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield "", wrapped
    attributes = _attributes(function)
    for name, held in (*names_around(function).items(), *globals_used(function).items()):
        yield name, held
        yield from _of_import(name, held, attributes)


def _attributes(function: FunctionType) -> dict[str, None]:
    """Names of attributes that it uses, in order."""
    used = uses(function.__code__)
    return dict.fromkeys(name for op, name in used if "ATTR" in op or op == "LOAD_METHOD")


def _of_import(
    path: str, value: Any, attributes: Collection[str], outer: tuple[Any, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """What a module or class of the user's own, known by a global name, holds under names that the function uses.

    outer: the modules and classes that lead to it.
    """
    if not _is_users_own(value) or value in outer:
        return
    for name in attributes:
        inner = vars(value).get(name)
        if inner is not None:
            yield f"{path}.{name}", inner
            yield from _of_import(f"{path}.{name}", inner, attributes, (*outer, value))


def _is_users_own(value: Any) -> bool:
    """Whether it is a module or a class of the user's own."""
    module = sys.modules.get(value.__module__) if isinstance(value, type) else value
    if not isinstance(module, ModuleType):
        return False
    return module.__name__ == "__main__" or not is_library(getattr(module, "__file__", None))
