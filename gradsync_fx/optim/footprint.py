"""What an optimizer's code reads and writes beside gradients, settings and state: all known, or the update is opaque.

torch's own optimizers    their code is known to touch parameters, gradients, groups and state only
any other                 its functions are walked before the trace (reached.py), and the twin that runs in the trace
                          watches its attributes and the keys of its state

A constant that is read (an attribute, a global, an entry of the class) becomes a guard, checked before each update. All
else (an attribute that is set, a model or a tensor kept somewhere, a clock, a table by `id`, a test of `requires_grad`)
is `Unseen`: the optimizer's own `step()` then runs as it is.
"""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Graph
from torch.optim import Optimizer

from gradsync_fx.optim.reached import MISSING, Reached, Unseen, an, is_constant, is_torchs
from gradsync_fx.user_lines import TORCHS


class Footprint:
    """What one trace of an optimizer's update depends on. Nothing is recorded for torch's own.

    Raises `Unseen` where the code alone tells that a trace would miss something.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer, self._reason = optimizer, ""
        self.torchs = is_torchs(optimizer)
        self._guards: dict[Any, tuple[Callable[[], Any], Any]] = {}
        self._names = frozenset[str]()
        self._of_class: set[str] = set()
        self._given: list[tuple[dict[str, Any], str, Any]] = []
        if not self.torchs:
            self.guard("members", lambda: _members(optimizer), "its parameters")
            groups = optimizer.param_groups
            self.guard("settings", lambda: tuple(map(tuple, groups)), "its groups")
            self._names = frozenset(Reached(optimizer, self.guard).names)

    def holds(self) -> bool:
        """Whether all constants that were read are what they were."""
        return all(_same(read(), value) for read, value in self._guards.values())

    def guard(self, key: Any, read: Callable[[], Any], what: str = "") -> None:
        """A constant that has to stay as it is, or a function (without `what`) that has to stay in its place.

        Raises `Unseen` for anything else.
        """
        value = read()
        if what and value is not MISSING and not is_constant(value):
            raise self.unseen(f"it reads {what}, which holds {an(value)}")
        if key not in self._guards:
            constant = what and value is not MISSING
            self._guards[key] = (read, copy.deepcopy(value) if constant else value)

    def unseen(self, why: str) -> Unseen:
        """Kept here, too: the optimizer's code may catch what is raised inside of it."""
        self._reason = self._reason or why
        return Unseen(why)

    def twin(self, groups: list[dict[str, Any]], state: dict[Any, dict[str, Any]]) -> Any:
        """An optimizer of the same class with other parameter groups and state; the original is not touched."""
        cls = type(self.optimizer)
        twin = object.__new__(cls := cls if self.torchs else _watching(cls))
        self._of_class = set(vars(cls))
        held = object.__getattribute__(twin, "__dict__")
        for name, value in vars(self.optimizer).items():
            held[name] = copy.deepcopy(value) if is_constant(value) else value
        held["param_groups"] = groups
        self._given = []
        for entries in (*groups, *state.values()) if not self.torchs else ():
            for name, value in entries.items():
                if name != "params" and not _is_value(value):
                    if not is_constant(value):
                        raise self.unseen(f"{name!r} of its groups or state holds {an(value)}")
                    entries[name] = copy.deepcopy(value)
                    self._given.append((entries, name, value))
        if self.torchs:
            held["state"] = defaultdict(dict, state)
        else:
            held["state"] = _State(self, [p for group in groups for p in group["params"]], state)
            held[_FOOTPRINT] = self
        return twin

    def raise_kept(self) -> None:
        """Raises `Unseen` where the code caught one, or made another error of it."""
        if self._reason:
            raise Unseen(self._reason) from None

    def check(self, twin: Any, returned: object = None) -> None:
        """Raises `Unseen` where the code that ran on a twin did what a trace does not see."""
        self.raise_kept()
        if self.torchs:
            return
        if returned is not None:
            raise self.unseen(f"its step returns {an(returned)}")
        held = object.__getattribute__(twin, "__dict__")
        for name, before in vars(self.optimizer).items():
            if is_constant(before) and name != "param_groups" and not _same(held[name], before):
                raise self.unseen(f"it changes its attribute {name!r}")
        for entries, name, value in self._given:
            if not _same(entries.get(name), value):
                raise self.unseen(f"it changes {name!r} of its groups or state")
        if (
            set(vars(object.__getattribute__(twin, "__class__"))) != self._of_class
            or not self.holds()
        ):
            raise self.unseen("it changes something of its class, or of its module")

    def give_attributes(self, real: Any, stand_in: Any) -> None:
        """What a user put on a parameter, for what stands in for it."""
        if self.torchs:
            return
        for name, value in vars(real).items():
            if name in self._names and not is_constant(value):
                raise self.unseen(f"its parameters have an attribute {name!r}, {an(value)}")
        self.guard(("parameter", id(real)), lambda: _constants(real), "attributes of parameters")
        vars(stand_in).update(copy.deepcopy(_constants(real)))

    def check_attributes(self, real: Any, stand_in: Any) -> None:
        """Raises `Unseen` where the code changed an attribute of a parameter."""
        if not self.torchs and not _same(dict(vars(stand_in)), _constants(real)):
            raise self.unseen("it sets an attribute of its parameters")

    def check_entries(self, before: dict[str, Any], after: dict[str, Any]) -> None:
        """Raises `Unseen` for an entry of a group or of the state that is left as something else than a value."""
        for name in dict.fromkeys([*before, *after]) if not self.torchs else ():
            old, new = before.get(name, MISSING), after.get(name, MISSING)
            new_number = old is MISSING and type(new) in (int, float)
            computed = isinstance(new, torch.Tensor | torch.SymInt | torch.SymFloat)
            if name != "params" and not (computed or new_number or _same(old, new)):
                raise self.unseen(f"it sets {name!r} of its groups or state to {an(new)}")

    def check_graph(self, graph: Graph, idle: int) -> None:
        """Takes the last `idle` inputs and outputs out of the graph of an update: parameters without a gradient.

        Raises `Unseen` where they are read or written, and where random numbers are drawn.
        """
        (out,) = graph.find_nodes(op="output")
        values = list(out.args[0])
        holders = graph.find_nodes(op="placeholder")[-idle:] if idle else []
        if values[len(values) - idle :] != holders or any(len(h.users) > 1 for h in holders):
            raise self.unseen("it reads or changes parameters that have no gradient")
        out.args = (tuple(values[: len(values) - idle]),)
        for holder in holders:
            graph.erase_node(holder)
        tags = (
            t for n in graph.nodes if n.op == "call_function" for t in getattr(n.target, "tags", ())
        )
        if torch.Tag.nondeterministic_seeded in tags:
            raise self.unseen("it draws random numbers")

    def read_attribute(self, name: str) -> None:
        """The twin's code is about to read an attribute."""
        if name in ("param_groups", "state") or name.startswith("__"):
            return
        held, key = vars(self.optimizer), ("attribute", name)
        if name in held or key not in self._guards:
            self.guard(key, lambda: held.get(name, MISSING), f"its attribute {name!r}")


def _members(optimizer: Optimizer) -> tuple[int, ...]:
    return tuple(id(p) for group in optimizer.param_groups for p in group["params"])


def _constants(parameter: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(parameter).items()
        if is_constant(value) and not name.startswith("_dynamo")
    }


def _is_value(value: Any) -> bool:
    """What a trace computes with: any other entry of a group or of the state has to stay as it is."""
    if type(value) is tuple and any(isinstance(v, torch.SymFloat) for v in value):
        return all(_is_value(v) or is_constant(v) for v in value)
    return isinstance(value, torch.Tensor | int | float | torch.SymInt | torch.SymFloat)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and bool(a == b))


_FOOTPRINT = "footprint of the trace"


def _from_outside() -> bool:
    """Whether code that is not torch's own is at work on the twin."""
    return not sys._getframe(2).f_code.co_filename.startswith(TORCHS)


def _watching(cls: Any) -> Any:
    """A subclass whose instances tell their footprint of attributes that are read and set."""

    def get(self: Any, name: str) -> Any:
        if _from_outside():
            object.__getattribute__(self, "__dict__")[_FOOTPRINT].read_attribute(name)
        return cls.__getattribute__(self, name)

    def put(self: Any, name: str, value: Any) -> None:
        if _from_outside():
            raise _of(self).unseen(f"it sets its attribute {name!r}")
        cls.__setattr__(self, name, value)

    def delete(self: Any, name: str) -> None:
        raise _of(self).unseen(f"it deletes its attribute {name!r}")

    methods = {"__getattribute__": get, "__setattr__": put, "__delattr__": delete}
    return type(cls)(cls.__name__, (cls,), {**methods, "__module__": cls.__module__})


def _of(twin: Any) -> Footprint:
    footprint: Footprint = object.__getattribute__(twin, "__dict__")[_FOOTPRINT]
    return footprint


class _State(defaultdict[Any, Any]):
    """The state of a twin: entries of its parameters, and nothing else."""

    def __init__(self, footprint: Footprint, parameters: Sequence[Any], state: Any) -> None:
        super().__init__(dict, state)
        self.footprint, self.allowed = footprint, set(map(id, parameters))


def _by_key(name: str) -> Any:
    plain = getattr(defaultdict, name)

    def call(self: _State, key: Any, *rest: Any) -> Any:
        if id(key) not in self.allowed:
            raise self.footprint.unseen(f"it looks into its state by {an(key)}")
        return plain(self, key, *rest)

    return call


def _at_large(self: _State, *rest: Any) -> Any:
    raise self.footprint.unseen("it looks through its whole state, or drops entries of it")


_BY_KEY = ("__getitem__", "__setitem__", "__contains__", "get", "setdefault")
_AT_LARGE = ("__iter__", "__len__", "__or__", "__eq__", "__delitem__", "keys", "values", "items")
for _name in _BY_KEY:
    setattr(_State, _name, _by_key(_name))
for _name in (*_AT_LARGE, "update", "clear", "copy", "pop", "popitem"):
    setattr(_State, _name, _at_large)
