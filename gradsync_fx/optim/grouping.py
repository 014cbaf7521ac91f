"""Parameters that an optimizer cannot tell apart but by their values: one of them is traced for all.

Alike are parameters of one group with the same form and the same state (counters included). Of one kind in each group
two are traced, so that a joint use of several parameters, or a use of their order, shows. An optimizer that asks how
many parameters a group has is traced whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.ir.program import form_of
from gradsync_fx.optim.number_tensor import is_counter
from gradsync_fx.optim.state import State
from gradsync_fx.optim.subgraphs import BodyCall, Place


class Members(list[Any]):
    """A group's parameters while an update is traced; remembers whether their number was asked for."""

    counted = False

    def __len__(self) -> int:
        self.counted = True
        return super().__len__()


def find_alike(
    optimizer: Optimizer, which: tuple[int, ...], state: dict[int, State]
) -> tuple[dict[int, list[int]], list[tuple[int, int]]]:
    """Positions to trace, and for each the positions that it stands for, itself first.

    And the pairs of positions that are alike and traced both.
    """
    flat = [(gi, p) for gi, group in enumerate(optimizer.param_groups) for p in group["params"]]
    kinds: dict[Any, list[int]] = {}
    for i in which:
        group, parameter = flat[i]
        held = tuple((key, _form(value)) for key, value in state.get(i, {}).items())
        kinds.setdefault((group, form_of(parameter), held), []).append(i)
    alike: dict[int, list[int]] = {}
    pairs: dict[int, tuple[int, int]] = {}
    for (group, _, _), positions in kinds.items():
        first, *others = positions
        if others and group not in pairs:
            pairs[group] = (first, others.pop(0))
            alike[pairs[group][1]] = []
        alike[first] = [first, *others]
    for first, positions in alike.items():
        if not positions:
            positions.append(first)
    return dict(sorted(alike.items())), list(pairs.values())


def treated_alike(calls: list[BodyCall], pairs: list[tuple[int, int]]) -> bool:
    """Whether both of each pair are updated by the same arithmetic with the same numbers."""
    of = {call.params[0]: (call.body, call.scalars) for call in calls}
    return all(of[one] == of[other] for one, other in pairs)


def _form(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (form_of(value), value.item() if is_counter(value) else None)
    return (type(value), value if isinstance(value, int | float | str | None) else id(value))


def for_all_places(places: Iterable[Place], alike: dict[int, list[int]]) -> list[Place]:
    """Places of what was traced, and of all that it stands for."""
    found: list[Place] = []
    for where, index, key in places:
        indices = alike[index] if where == "state" else [index]
        found.extend((where, i, key) for i in indices)
    return found


def for_all_calls(
    calls: list[BodyCall], states: list[Place], alike: dict[int, list[int]]
) -> tuple[list[BodyCall], list[Place]]:
    """A call for each parameter, in their order, and the list of state tensors that these count along."""
    everything = for_all_places(states, alike)
    number = {place: n for n, place in enumerate(everything)}
    found: dict[int, BodyCall] = {}
    for call in calls:
        (traced,) = call.params
        for i in alike[traced]:
            mine = [
                (where, i if where == "state" else index, key)
                for where, index, key in (states[n] for n in call.states)
            ]
            found[i] = replace(
                call,
                params=(i,),
                states=tuple(number[place] for place in mine),
                written=tuple((where, i, key) for where, _, key in call.written),
            )
    return [found[i] for i in sorted(found)], everything
