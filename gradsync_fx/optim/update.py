"""A traced update: what it takes and leaves, and whether it still is what the optimizer would do.

params, grads, states, scalars  ->  calls  ->  new params, then what each call has `written`
numbers of the state            ->  host   ->  scalars for the calls, then the numbers of `number_out`
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradsync_fx.optim.conditions import Numbers, as_function
from gradsync_fx.optim.footprint import Footprint
from gradsync_fx.optim.host_arithmetic import ties
from gradsync_fx.optim.state import State
from gradsync_fx.optim.subgraphs import BodyCall, Place


@dataclass(slots=True)
class Update:
    """A traced update of one optimizer. Made by a trace, and never changed; another structure needs another trace.

    which: positions of the parameters that have a gradient; `params` and `grads` are in this order.
    calls: the arithmetic on tensors, in order. elsewhere: that of parameters which other ranks update (shares.py).
    states: entries of the state that are tensors and are read, in the order of the program's inputs.
    host: the arithmetic on numbers, done by the host before each run.
    numbers: for each number that `host` takes: the entries that hold it, equal in all, and which item of a tuple it is.
    number_out: for each number that `host` leaves: the entries that it goes to.
    scalar_count: how many outputs of `host` the calls read.
    conditions: on `symbols`, under which the trace holds.
    symbols: one for each of `numbers`.
    constants: entries that were traced as constants, each with its value then.
    structure: names of each parameter's state at the trace, by position.
    footprint: what else the optimizer's code read.
    created: state tensors that this update makes anew (a first update whose start could not be foreseen).
    makes_state: whether it makes state tensors, on this rank or another.
    lasting: False where a condition ties a number that the update changes to its value, so that the next one needs
        another trace.
    """

    optimizer: Optimizer
    which: tuple[int, ...]
    calls: list[BodyCall]
    states: list[Place]
    host: GraphModule
    numbers: list[tuple[list[Place], int | None]]
    number_out: list[list[Place]]
    scalar_count: int
    conditions: list[Any]
    symbols: list[Any]
    constants: list[tuple[Place, Any]]
    structure: dict[int, tuple[str, ...]]
    footprint: Footprint
    lasting: bool = True
    elsewhere: list[BodyCall] = field(default_factory=list)
    created: list[Place] = field(init=False)
    makes_state: bool = field(init=False)
    _checks: list[Callable[[Numbers], bool]] = field(init=False)  # the conditions, in their order

    def __post_init__(self) -> None:
        held = set(self.states)
        self.created = [p for call in self.calls for p in call.written if p not in held]
        others = (p for call in self.elsewhere for p in call.written)
        self.makes_state = bool(self.created) or any(p not in held for p in others)
        self._checks = [as_function(condition, self.symbols) for condition in self.conditions]

    def read_numbers(self, state: dict[int, State]) -> Numbers | None:
        """The numbers as they are now (`state` is by position); None when the state has another structure than at
        the trace, or when numbers that were equal no longer are."""
        if self.structure != structure_of(self.which, state):
            return None
        found: Numbers = []
        for places, part in self.numbers:
            first, *others = (self._read(place, part, state) for place in places)
            if any(other != first for other in others):
                return None
            found.append(first)
        return found

    def _read(self, place: Place, part: int | None, state: dict[int, State]) -> int | float:
        where, index, key = place
        value = (self.optimizer.param_groups[index] if where == "group" else state[index])[key]
        if part is not None:
            value = value[part]
        number: int | float = value.item() if isinstance(value, torch.Tensor) else value
        return number

    def fits(self, numbers: Numbers | None, state: dict[int, State]) -> bool:
        """Whether the constants and conditions under which the update was traced still hold."""
        if numbers is None or not self.footprint.holds():
            return False
        groups = self.optimizer.param_groups
        for (where, index, key), value in self.constants:
            owner = groups[index] if where == "group" else state[index]
            if key not in owner or not _same(owner[key], value):
                return False
        return all(holds(numbers) for holds in self._checks)

    def lasts(self, numbers: Numbers) -> bool:
        """Whether the numbers that this update leaves keep those that a condition ties to one value."""
        left = self.host(*numbers)[self.scalar_count :]
        new = {p: v for places, v in zip(self.number_out, left, strict=True) for p in places}
        pairs = zip(self.numbers, numbers, strict=True)
        later = [new.get(places[0], number) for (places, _), number in pairs]
        checks = zip(self.conditions, self._checks, strict=True)
        return all(holds(later) for condition, holds in checks if ties(condition))


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and not isinstance(a, torch.Tensor) and bool(a == b))


def structure_of(which: tuple[int, ...], state: dict[int, State]) -> dict[int, tuple[str, ...]]:
    """Names of each parameter's state, by position."""
    return {i: tuple(state.get(i, {})) for i in which}
