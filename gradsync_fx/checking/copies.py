"""Copies a step with all that it touches: arguments, what its closure and globals hold, the user's functions.

One memo for everything: an optimizer's copy holds the parameters of the model's copy. Shared with the original are
only classes, modules, functions that hold nothing, and process groups.
"""

from __future__ import annotations

import copy
import copyreg
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx._torch import counted_by_scheduler, tree_leaves
from gradsync_fx.capture.names import ddp_modules, named_tensors
from gradsync_fx.capture.reachable import discover
from gradsync_fx.classes import family
from gradsync_fx.code_uses import globals_used, names_around
from gradsync_fx.errors import WindowError
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.optim.zeroing import own_among
from gradsync_fx.user_lines import is_library


@dataclass(frozen=True, slots=True)
class Copy:
    """A function with arguments, and the objects that it was found to touch, named."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    optimizers: tuple[Optimizer, ...]
    ddp: tuple[DistributedDataParallel, ...]
    clearing: tuple[nn.Module, ...]  # whose `zero_grad` is the user's own

    def objects(self) -> list[object]:
        """What a window changes."""
        return [*self.parameters.values(), *self.buffers.values(), *self.optimizers]


def of(function: Callable[..., Any], args: Any, kwargs: Any) -> Copy:
    """The function and its arguments as they are, with what they lead to."""
    found = discover(function, args, kwargs)
    seen = found.observed()
    parameters, buffers = named_tensors(seen)
    known = {id(p) for p in parameters.values()}
    owned = {id(p) for o in found.optimizers for p in parameters_of(o)}
    # Gradients of inputs are their own.
    known |= {id(v) for v in tree_leaves((args, kwargs)) if not isinstance(v, nn.Parameter)} - owned
    parameters.update({n: t for n, t in found.tensors.items() if id(t) not in known})
    ddp = ddp_modules(seen)
    clearing = tuple(own_among(found.modules))
    optimizers = tuple(found.optimizers)
    return Copy(function, tuple(args), kwargs, parameters, buffers, optimizers, ddp, clearing)


def copied(
    function: Callable[..., Any], args: Any, kwargs: Any, without: Iterable[type] = ()
) -> Copy:
    """Copies of all of it. without: classes whose objects the copies do not hold.

    Raises `WindowError` for what cannot be copied.
    """
    original = of(function, args, kwargs)
    memo: dict[int, Any] = {}
    copier = _Copier(memo)
    table = {
        **dict.fromkeys(family(ProcessGroup), _by_reference),
        **dict.fromkeys(without, _left_out),
    }
    with (
        mock.patch.dict(copyreg.dispatch_table, table),
        mock.patch.object(Optimizer, "__deepcopy__", copier.optimizer(), create=True),
    ):
        mine = copier.value("the step", function)
        arguments = copier.value("its arguments", (tuple(args), dict(kwargs)))
    for ddp in original.ddp:
        # A copy of a DDP module takes the default group for its own.
        memo[id(ddp)].process_group = ddp.process_group
    made = of(mine, *arguments)
    kept = set(map(id, made.objects())) & set(map(id, original.objects()))
    if kept:
        names = [n for n, t in made.parameters.items() if id(t) in kept] or ["an optimizer"]
        raise WindowError(
            f"self_check, {names[0]}",
            seen="copies of the step's objects still lead to the original",
            wanted="objects that copy.deepcopy copies whole",
            fix="pass model and optimizer to the step as arguments",
        )
    return made


def _by_reference(value: object) -> str:
    return type(value).__name__


def _left_out(value: object) -> tuple[type, tuple[()]]:
    return object, ()


class _Copier:
    """`copy.deepcopy`, which takes functions as they are, with copies of the user's functions."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._namespaces: dict[int, dict[str, Any]] = {}

    def value(self, name: str, value: Any) -> Any:
        """A copy of one object, known as `name`."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            owner = self.value(name, value.__self__)
            return MethodType(self.value(name, value.__func__), owner)
        if isinstance(value, functools.partial):
            inner = self.value(name, value.func)
            rest = self.value(name, (value.args, value.keywords))
            return functools.partial(inner, *rest[0], **rest[1])
        try:
            return copy.deepcopy(value, self._memo)
        except Exception as failure:
            raise WindowError(
                f"self_check, {name}",
                seen=f"{type(value).__name__} cannot be copied ({type(failure).__name__}: {failure})",
                wanted="a step whose objects copy.deepcopy can copy: the check runs on copies",
                fix="check a step without it, or give its class a __deepcopy__",
            ) from failure

    def optimizer(self) -> Callable[[Optimizer, dict[int, Any]], Optimizer]:
        """How an optimizer is copied: with all that it holds. torch's own way leaves out what is not torch's."""

        def copied(optimizer: Optimizer, memo: dict[int, Any]) -> Optimizer:
            mine = object.__new__(type(optimizer))
            memo[id(optimizer)] = mine
            for name, value in vars(optimizer).items():
                if name == "step" and counted_by_scheduler(value):
                    continue
                if isinstance(value, dict) and any(
                    isinstance(v, FunctionType) for v in value.values()
                ):
                    hooks = {key: self.value(name, hook) for key, hook in value.items()}
                    vars(mine)[name] = type(value)(hooks)
                else:
                    vars(mine)[name] = self.value(name, value)
            return mine

        return copied

    def _function(self, function: FunctionType) -> FunctionType:
        if is_library(function.__code__.co_filename):
            return function  # it holds nothing of the user's
        # Without the module's name: Dynamo would look a global of an imported module up in the module itself.
        theirs_all = function.__globals__
        namespace = self._namespaces.setdefault(
            id(theirs_all), {n: v for n, v in theirs_all.items() if n != "__name__"}
        )
        cells = tuple(CellType() for _ in function.__closure__ or ())
        mine = FunctionType(
            function.__code__.replace(), namespace, function.__name__, None, cells or None
        )
        self._memo[id(function)] = mine  # before what it holds: it may hold itself
        mine.__dict__.update(
            {n: self.value(function.__qualname__, v) for n, v in vars(function).items()}
        )
        mine.__defaults__ = self.value(function.__qualname__, function.__defaults__)
        mine.__kwdefaults__ = self.value(function.__qualname__, function.__kwdefaults__)
        mine.__qualname__ = function.__qualname__
        around = names_around(function)
        for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
            if name in around:
                cell.cell_contents = self.value(name, around[name])
        for name, held in globals_used(function).items():
            if held is not None and not isinstance(held, ModuleType):
                namespace[name] = self.value(name, held)
        return mine
