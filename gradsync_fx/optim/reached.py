"""The functions that an optimizer's `step` may reach, walked by the names that they use, before anything runs.

What they read outside of the optimizer (a global, an entry of its class, a name of an enclosing function) has to be a
constant, and stay one; modules and functions that compute from their arguments are taken for what they are.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.code_uses import FROM_CELLS, TEXT, cells_of, uses
from gradsync_fx.user_lines import TORCHS


class Unseen(Exception):
    """The trace of an update does not see all that the optimizer's code does."""


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set of names."""
    return frozenset(text.split())


Guard = Callable[..., Any]  # key, how it is read, and for a constant: what it is for people
MISSING = object()
_PLAIN: tuple[type, ...] = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    slice,
    range,
    type(...),
)
_PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
# Modules whose functions compute from their arguments, and do nothing else.
_PURE = words(
    "math cmath operator _operator functools _functools itertools collections typing abc numbers builtins "
    "enum types warnings copy dataclasses contextlib typing_extensions __future__ _collections_abc"
)
# What tells a stand-in from the parameter, looks past the optimizer, or does something whenever it runs.
_BUILTINS = words(
    "id hash print open input exec eval compile globals locals vars setattr delattr breakpoint __import__ "
    "object"
)
_ATTRIBUTES = words(
    "requires_grad requires_grad_ is_leaf grad_fn Parameter data_ptr storage untyped_storage _version "
    "register_hook numpy set_ is_compiling is_grad_enabled compile cuda seed manual_seed initial_seed "
    "get_rng_state set_rng_state Generator default_generator set_default_dtype save load stdout stderr "
    "__dict__ __code__ __globals__ __closure__ __setattr__ __getattribute__"
)
_TEXTS = words("requires_grad is_leaf grad_fn __dict__")
_OPTIM = ("torch.optim.",)
_ROOTS = ("torch", "builtins", "abc", "typing")
# Methods of a class that are not called when something is computed.
_ASIDE = words(
    "__init__ __new__ __repr__ __str__ __getstate__ __setstate__ __reduce__ __reduce_ex__ __copy__ "
    "__deepcopy__ __del__"
)


def plain_step(optimizer: Optimizer) -> Any:
    """The class's `step` without torch's wrappers (the profiler's and hooks', `no_grad`); a user's own stay."""
    return _unwrapped(type(optimizer).step)


def is_torchs(optimizer: Optimizer) -> bool:
    """Whether its class is one of torch.optim itself, its code torch's own."""
    cls = type(optimizer)
    return getattr(torch.optim, cls.__name__, None) is cls and of_torch(plain_step(optimizer))


def is_constant(value: Any, *, frozen: bool = False) -> bool:
    """Whether a value is what it says: no object that leads to others. frozen: nor one that changes in place."""
    if type(value) in _PLAIN or isinstance(value, enum.Enum):
        return True
    if type(value) in (tuple, frozenset) or type(value) in (list, set) and not frozen:
        return all(is_constant(v, frozen=frozen) for v in value)
    if type(value) is dict and not frozen:
        return all(type(key) is str and is_constant(v) for key, v in value.items())
    return False


def an(value: Any) -> str:
    """The kind of a value, for people."""
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"


def of_torch(function: Any) -> bool:
    """Whether a function's code is torch's own."""
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.startswith(TORCHS)


def _unwrapped(function: Any) -> Any:
    while hasattr(function, "__wrapped__") and of_torch(function):
        function = function.__wrapped__
    return function


class Reached:
    """Walks what `optimizer.step` may reach. names: all attributes and texts that its code uses.

    guard: is told each constant outside that is read, and each function that is called. Raises `Unseen` for anything
    that a trace would miss.
    """

    def __init__(self, optimizer: Optimizer, guard: Guard) -> None:
        self._guard, self._mro = guard, type(optimizer).__mro__
        self._own = [c for c in self._mro if c.__module__.partition(".")[0] not in _ROOTS]
        self.names: set[str] = set()
        self._set: set[str] = set()
        self._seen: set[int] = set()
        self._modules: dict[str, ModuleType] = {}
        self._check_class(type(optimizer))
        self._function(type(optimizer).step)
        before = -1
        while before != (before := len(self._seen) + len(self.names)):
            for cls in self._own:
                for name in vars(cls):
                    if name in self.names or name.startswith("__") and name not in _ASIDE:
                        self._entry(cls, name)
            for module in list(self._modules.values()):
                for name in self.names.intersection(vars(module)):
                    self._value(vars(module), name, f"{module.__name__}.{name}")

    def _check_class(self, cls: type) -> None:
        for base in self._mro:
            if base.__module__.startswith("torch.") and not base.__module__.startswith(_OPTIM):
                raise Unseen(f"its class is, or is made from, {base.__name__}")
        for base in self._own:
            for name in ("__getattribute__", "__setattr__", "__delattr__", "__init_subclass__"):
                if name in vars(base):
                    raise Unseen(f"its class has a {name} of its own")
        if type(cls).__module__ not in ("builtins", "abc"):
            raise Unseen("its class has a metaclass of its own")

    def _entry(self, cls: type, name: str) -> None:
        """Something that a class of the optimizer's own holds."""
        value = vars(cls)[name]
        if callable(value) or isinstance(value, property | classmethod | staticmethod):
            self._guard((cls, name), lambda: vars(cls).get(name))
        if isinstance(value, property):
            for function in (value.fget, value.fset):
                self._function(function)
        elif isinstance(value, classmethod | staticmethod):
            self._function(value.__func__)
        elif isinstance(value, FunctionType):
            self._function(value)
        elif not name.startswith("__"):
            if name in self._set:
                raise Unseen(f"it sets {name!r} of its class")
            what = f"{name!r} of its class"
            self._constant((cls, name), lambda: vars(cls).get(name, MISSING), what)

    def _constant(self, key: Any, read: Callable[[], Any], what: str) -> None:
        value = read()
        if not is_constant(value, frozen=True):
            raise Unseen(f"it reads {what}, which holds {an(value)}")
        self._guard(key, read, what)

    def _function(self, function: Any) -> None:
        function = _unwrapped(function)
        if function is None or id(function) in self._seen or of_torch(function):
            return
        if not isinstance(function, FunctionType):
            raise Unseen(f"it calls {an(function)}")
        self._seen.add(id(function))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not is_constant(value, frozen=True):
                raise Unseen(f"a default of {function.__name__} is {an(value)}")
        names, cells = function.__globals__, cells_of(function)
        for op, name in uses(function.__code__):
            if op in ("STORE_GLOBAL", "DELETE_GLOBAL") or op == "STORE_DEREF" and name in cells:
                raise Unseen(f"it sets the name {name!r}, outside of itself")
            if op in ("LOAD_GLOBAL", "LOAD_NAME"):
                self._value(names, name, f"the global {name!r}")
            elif op in FROM_CELLS and name in cells:
                self._value(_Cell(cells[name]), name, f"the name {name!r} around it")
            elif op == "IMPORT_NAME":
                self._module(sys.modules.get(name), name)
            elif "ATTR" in op or op == "LOAD_METHOD":
                self._attribute(name)
                if op in ("STORE_ATTR", "DELETE_ATTR"):
                    self._set.add(name)
            elif op == TEXT:
                if name in _TEXTS:
                    self._attribute(name)
                self.names.add(name)

    def _attribute(self, name: str) -> None:
        if name in _ATTRIBUTES:
            raise Unseen(f"its code uses {name!r}")
        self.names.add(name)

    def _value(self, names: Any, name: str, what: str) -> None:
        """What a name outside of the optimizer leads to."""
        value = names.get(name, MISSING)
        if value is MISSING:
            if name in _BUILTINS:
                raise Unseen(f"its code uses {name!r}")
            value = getattr(builtins, name, None)
        if isinstance(value, ModuleType):
            self._module(value, name)
        elif isinstance(value, FunctionType):
            if not _pure(value):
                self._guard((_key(names), name), lambda: names.get(name, MISSING))
                self._function(value)
        elif isinstance(value, type):
            if value is torch.nn.Parameter or not (
                value in self._mro or _pure(value) or issubclass(value, Exception)
            ):
                raise Unseen(f"it uses the class {value.__name__}")
        elif isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            if not _pure(value) or not isinstance(owner, ModuleType | type | None):
                raise Unseen(f"it calls {what}")
        elif type(value).__module__ not in ("typing", "torch._ops", "types"):
            if name in self._set and isinstance(names, dict):
                raise Unseen(f"it sets {what}")
            self._constant((_key(names), name), lambda: names.get(name, MISSING), what)

    def _module(self, module: ModuleType | None, name: str) -> None:
        found = module.__name__ if module is not None else name
        root = found.partition(".")[0]
        if found.startswith(("torch.distributed", "torch.multiprocessing", "torch.utils.data")):
            raise Unseen(f"it uses {found}")
        if root in _PURE or root == "torch":
            return
        if module is None or root in sys.stdlib_module_names:
            raise Unseen(f"it uses the module {found}")
        self._modules[found] = module


class _Cell:
    """A cell of a closure, in a dictionary's clothes."""

    def __init__(self, cell: Any) -> None:
        self.cell = cell

    def get(self, name: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return default


def _key(names: Any) -> int:
    return id(names.cell if isinstance(names, _Cell) else names)


def _pure(value: Any) -> bool:
    """Whether torch, or a module of `_PURE`, defines it, and not only wraps it."""
    if isinstance(value, FunctionType) and inspect.unwrap(value) is not value:
        return _pure(inspect.unwrap(value)) and of_torch(value)
    module = getattr(value, "__module__", None) or "builtins"
    root = module.partition(".")[0]
    return module in _PURE or root in _PURE or root == "torch" and ".distributed" not in module
