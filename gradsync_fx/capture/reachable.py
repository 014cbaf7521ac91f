"""Object reachability: the modules, optimizers and tensors that a function's arguments and names lead to.

A trace meets these objects as it goes; an eager run has to know them before: their gradients, process group, buffers.
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync_fx.capture.trace_state import Observed, outermost
from gradsync_fx.code_uses import globals_used, names_around, uses
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.user_lines import is_library


MANY = 4096  # items of a list: beyond them, it is data
DEPTH = 6  # links from an argument to an object: trainer.state.model.optimizers["a"] has 4


@dataclass(slots=True)
class Found:
    """Objects in the order of their discovery; all but optimizers with the path that leads to them."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    pipelines: list[tuple[str, object]] = field(default_factory=list)

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
    while queue:
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
        for name, inner in _links(value):
            queue.append((f"{path}.{name}" if path else name, inner, depth + 1))
    for optimizer in found.optimizers:
        for i, p in enumerate(parameters_of(optimizer)):
            found.tensors.setdefault(f"{type(optimizer).__name__}.{i}", p)
    return found


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


def _of_function(function: FunctionType) -> Iterator[tuple[str, Any]]:
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None:
        yield "", wrapped
    yield from names_around(function).items()
    code = uses(function.__code__)
    attributes = {name for op, name in code if "ATTR" in op or op == "LOAD_METHOD"}
    for name, value in globals_used(function).items():
        yield name, value
        yield from _of_import(name, value, attributes)


def _of_import(path: str, value: Any, attributes: Collection[str]) -> Iterator[tuple[str, Any]]:
    """What a module of the user's own, known by a global name, holds under names that the function uses."""
    if isinstance(value, ModuleType) and not is_library(getattr(value, "__file__", None)):
        for name in sorted(attributes):
            if name in vars(value) and vars(value)[name] is not value:
                yield f"{path}.{name}", vars(value)[name]
