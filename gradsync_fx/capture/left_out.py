"""Static check of calls that a trace defers: refuses helpers that may reach what the step is made of.

given       a module with parameters, a parameter, an optimizer, a generator among its arguments: not deferred
named       the same in what its code names: globals, closures, attributes of the objects that it has, and those of the
            user's functions that it calls; and the names by which random generators are set or drawn from
not walked  the code of libraries. What that does is seen when it runs (untouched.py)

Only names are followed: a logger whose trainer holds the model does not count as reaching it.
"""

from __future__ import annotations

import functools
import random
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from types import BuiltinFunctionType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync_fx.capture.numpy_draws import is_numpys_generator
from gradsync_fx.code_uses import FROM_CELLS, TEXT, cells_of, uses
from gradsync_fx.optim.reached import an, words
from gradsync_fx.user_lines import is_library


MANY = 4096  # items of a list: beyond them, it is data
_DRAWS = words(
    "seed manual_seed manual_seed_all seed_all set_rng_state fork_rng setstate set_state default_rng random rand randn "
    "randint randrange randperm rand_like randn_like randint_like uniform normal gauss choice choices sample shuffle "
    "permutation bernoulli multinomial poisson standard_normal betavariate expovariate"
)
_DIFFERENTIATES = frozenset(("backward", "autograd", "manual_backward"))
# Methods of every module that lead to its parameters, or set what its forward does.
_OF_MODULES = words(
    "parameters named_parameters buffers named_buffers modules named_modules children named_children get_parameter "
    "get_submodule state_dict load_state_dict zero_grad requires_grad_ forward apply train eval"
)
# Methods of a class that are not called when something is computed.
_ASIDE = words(
    "__repr__ __str__ __getstate__ __setstate__ __reduce__ __reduce_ex__ __copy__ __deepcopy__ __del__"
)


_MAKING = frozenset(("__init__", "__new__", "__post_init__"))


class Touches(Exception):
    """A helper may touch what the step is made of; the text says how."""


def check_helper(
    function: Any, given: Iterable[Any], *, differentiable: bool, trained: Callable[[Any], bool]
) -> None:
    """Raises `Touches` where a call of `function` with these values may not be deferred.

    differentiable: whether a gradient flows through its arguments. trained: whether a tensor is one of the parameters.
    """
    walk = _Walk(trained)
    for value in given:
        walk.look(value, "", given=True)
    walk.function(function)
    walk.follow()
    if differentiable and (not _is_users(function) or walk.names & _DIFFERENTIATES):
        raise Touches("a gradient flows through its arguments")


class _Walk:
    """names: all attributes and texts that the code met so far uses."""

    def __init__(self, trained: Callable[[Any], bool]) -> None:
        self._trained = trained
        self.names: set[str] = set()
        self._seen: dict[int, Any] = {}
        self._objects: list[tuple[Any, str]] = []
        self._classes: dict[bool, dict[int, type]] = {}

    def follow(self) -> None:
        """Looks at what the names lead to, until nothing new is found."""
        before = -1
        while before != (before := len(self._seen) + len(self.names) + len(self._objects)):
            for value, what in list(self._objects):
                self._attributes(value, what)

    def look(self, value: Any, what: str, *, given: bool = False) -> None:
        """Something that the code names. given: or that it is given."""
        reaches = f"it reaches {what}, " if what else "it is given "
        kind = self._kind(value)
        if kind is not None:
            raise Touches(reaches + kind)
        if isinstance(value, FunctionType | MethodType | BuiltinFunctionType):
            self.function(value)
            return
        if id(value) in self._seen or value is None:
            return
        self._seen[id(value)] = value
        if isinstance(value, Mapping):
            for key, inner in islice(value.items(), MANY):
                self.look(inner, f"{what}[{key!r}]" if what else "", given=given)
        elif isinstance(value, list | tuple | set | frozenset):
            for inner in islice(value, MANY):
                self.look(inner, what, given=given)
        elif isinstance(value, functools.partial):
            self.look((value.func, value.args, value.keywords), what, given=given)
        elif isinstance(value, weakref.ref):
            self.look(value(), what, given=given)
        elif isinstance(value, type):
            self._class(value, made=True)
        elif isinstance(value, ModuleType):
            self._module(value)
        elif not isinstance(value, torch.Tensor | str | bytes | int | float | complex):
            self._object(value, what)

    def _kind(self, value: Any) -> str | None:
        """What it is that may not be touched; None for anything else."""
        if isinstance(value, nn.Module):
            held = any(p.requires_grad or self._trained(p) for p in value.parameters())
            return f"a module that is trained ({type(value).__name__})" if held else None
        if isinstance(value, Optimizer | LRScheduler | GradScaler):
            return an(value)
        if isinstance(value, torch.Generator | random.Random):
            return "a random generator"
        if isinstance(value, torch.Tensor) and (
            isinstance(value, nn.Parameter) or value.requires_grad or self._trained(value)
        ):
            return "a tensor that is trained"
        return None

    def _object(self, value: Any, what: str) -> None:
        self._objects.append((value, what or type(value).__name__))
        self._class(type(value))

    def _class(self, cls: type, *, made: bool = False) -> None:
        """made: the code may make objects of it, too."""
        for base in cls.__mro__:
            if id(base) in self._classes.get(made, ()) or not _of_user(base):
                continue
            self._classes.setdefault(made, {})[id(base)] = base
            self._objects.append((base, base.__name__))
            for name, entry in list(vars(base).items()):
                aside = _ASIDE if made else _ASIDE | _MAKING
                if name.startswith("__") and name not in aside and callable(entry):
                    self.function(entry)

    def _module(self, module: ModuleType) -> None:
        """What it does with names of the code met so far is looked at with every further name."""
        self._objects.append((module, module.__name__))

    def _attributes(self, value: Any, what: str) -> None:
        if isinstance(value, ModuleType) and is_library(getattr(value, "__file__", None)):
            draws = sorted(self.names & _DRAWS & vars(value).keys())
            if draws and value.__name__.partition(".")[0] in ("random", "numpy", "torch"):
                raise Touches(f"it uses {value.__name__}.{draws[0]}: a random generator")
            return
        held = value if isinstance(value, type) else type(value)
        for name in sorted(self.names):
            found = getattr(value, "__dict__", {}).get(name)
            entry = next((vars(c)[name] for c in held.__mro__ if name in vars(c)), None)
            if isinstance(value, nn.Module):
                if name in _OF_MODULES and self._kind(value):
                    raise Touches(f"it uses {name!r} of a module that is trained")
                for parts in (value._parameters, value._modules, value._buffers):
                    found = parts.get(name, found) if found is None else found
            if found is None and isinstance(entry, MemberDescriptorType) and held is type(value):
                found = getattr(value, name, None)  # a slot
            if found is not None and not isinstance(
                found, property | classmethod | staticmethod | MemberDescriptorType
            ):
                self.look(found, f"{what}.{name}")
            for function in _functions(entry):
                self.function(function)

    def function(self, function: Any) -> None:
        """A function that is called, with what it is bound to."""
        if isinstance(function, MethodType):
            self._bound_to(function.__self__, "self")
            function = function.__func__
        if isinstance(function, BuiltinFunctionType):
            self._builtin(function)
        if not isinstance(function, FunctionType) or id(function) in self._seen:
            return
        self._seen[id(function)] = function
        self.names.add(function.__name__)
        inner = getattr(function, "__wrapped__", None)
        if inner is not None:
            self.function(inner)
        if is_library(function.__code__.co_filename):
            if function.__name__ in _DRAWS and function.__module__.startswith(("torch", "random")):
                raise Touches(f"it calls {function.__name__}: a random generator")
            return
        self._code(function)

    def _bound_to(self, owner: Any, what: str) -> None:
        """Whatever a method is bound to is followed: a trainer may be a module, and log."""
        kind = self._kind(owner)
        if kind is not None and not isinstance(owner, nn.Module):
            raise Touches(f"it is a method of {kind}")
        if id(owner) not in self._seen:
            self._seen[id(owner)] = owner
            self._object(owner, what)

    def _builtin(self, function: BuiltinFunctionType) -> None:
        owner = function.__self__
        if isinstance(owner, random.Random) or is_numpys_generator(owner):
            raise Touches(f"it calls {function.__name__}: a random generator")
        if function.__name__ in _DRAWS and type(owner).__module__.startswith("torch"):
            raise Touches(f"it calls torch.{function.__name__}: a random generator")

    def _code(self, function: FunctionType) -> None:
        names, cells = function.__globals__, cells_of(function)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.look(value, f"a default of {function.__name__}")
        for op, name in uses(function.__code__):
            if op in ("LOAD_GLOBAL", "LOAD_NAME") and name in names:
                self.look(names[name], f"the global {name!r}")
            elif op in FROM_CELLS and name in cells:
                self._cell(cells[name], name)
            elif op == "IMPORT_NAME":
                self.look(sys.modules.get(name), "")
            elif "ATTR" in op or op in ("LOAD_METHOD", "IMPORT_FROM") or op == TEXT:
                self.names.add(name)

    def _cell(self, cell: Any, name: str) -> None:
        try:
            value = cell.cell_contents
        except ValueError:
            return  # a name that is not assigned yet
        if name == "self":
            self._bound_to(value, name)
        else:
            self.look(value, f"the name {name!r} around it")


def _functions(entry: Any) -> list[Any]:
    if isinstance(entry, property):
        return [f for f in (entry.fget, entry.fset) if f is not None]
    if isinstance(entry, classmethod | staticmethod):
        return [entry.__func__]
    return [entry] if isinstance(entry, FunctionType) else []


def _of_user(cls: type) -> bool:
    return any(_is_users(f) for entry in vars(cls).values() for f in _functions(entry))


def _is_users(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and not is_library(code.co_filename)
