"""Binds a traced update to the user's optimizer: reads its state and numbers, and writes back what an update left.

The optimizer stays the user's object: what it holds is what the programs read and write. State that does not exist
before the first update is held back here until that update has happened.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx._torch import step_hooks
from gradsync_fx.errors import UpdateError
from gradsync_fx.optimizer_state import State, initial_state, parameters_of
from gradsync_fx.optimizer_trace import Update, trace_update


def check_pre_hooks(optimizer: Optimizer) -> None:
    """Raises `UpdateError` for hooks that would have to run ahead of the update, in the middle of a program."""
    if step_hooks(optimizer)[0]:
        raise UpdateError(
            f"{type(optimizer).__name__}",
            seen="it has hooks that run before its step",
            wanted="an optimizer without step_pre_hooks",
            fix="do what the hook does inside the step, between backward() and optimizer.step()",
        )


class Binding:
    """One `optimizer.step()` of a step: the parameters at positions `which` of one optimizer, and the window's part."""

    def __init__(
        self, optimizer: Optimizer, which: tuple[int, ...], decompositions: Any, part: int
    ) -> None:
        self.optimizer, self.which, self.part = optimizer, which, part
        self._decompositions = decompositions
        check_pre_hooks(optimizer)
        self._early: dict[int, State] = initial_state(optimizer, list(which)) or {}
        self._traces: list[Update] = []
        self._numbers_out: tuple[Any, ...] = ()

    def state(self) -> dict[int, State]:
        """By position: what the optimizer holds, or will hold at its first update."""
        flat = parameters_of(self.optimizer)
        return {i: self.optimizer.state.get(flat[i]) or self._early.get(i, {}) for i in self.which}

    def shares_state(self, other: Binding) -> bool:
        """Whether one of them would have to see what the other left in the optimizer's state."""
        shared = set(self.which) & set(other.which) if self.optimizer is other.optimizer else set()
        return any(self.state()[i] for i in shared)

    def trace(self) -> Update:
        """The traced update that fits the optimizer as it is now; traced anew only when none does."""
        check_pre_hooks(self.optimizer)
        state = self.state()
        for known in self._traces:
            if known.fits(known.read_numbers(state), state):
                return known
        fresh = trace_update(self.optimizer, self.which, state, self._decompositions)
        self._traces.append(fresh)
        return fresh

    def state_tensors(self, update: Update) -> list[torch.Tensor]:
        """The tensors that the update reads and writes, in its order."""
        state, groups = self.state(), self.optimizer.param_groups
        return [
            (groups[i] if where == "group" else state[i])[key] for where, i, key in update.states
        ]

    def scalars(self, update: Update) -> list[torch.Tensor]:
        """Host arithmetic of this update: one float64 tensor of one element for each scalar input."""
        numbers = update.read_numbers(self.state())
        assert numbers is not None
        values = update.host(*numbers)
        self._numbers_out = values[update.scalar_count :]
        return [torch.tensor(float(v), dtype=torch.float64) for v in values[: update.scalar_count]]

    def commit(self, update: Update, created: list[torch.Tensor]) -> None:
        """After the program ran: counters, new state, and what schedulers and hooks look at."""
        state, flat = self.state(), parameters_of(self.optimizer)
        for place, value in zip(update.created, created, strict=True):
            self._put(place, value, state)
        for places, value in zip(update.number_out, self._numbers_out, strict=True):
            for place in places:
                self._put(place, value, state)
        for i in self.which:
            if state[i]:
                self.optimizer.state[flat[i]] = state[i]
        self._early.clear()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # read by lr_scheduler
        for hook in step_hooks(self.optimizer)[1]:
            hook(self.optimizer, (), {})

    def _put(self, place: tuple[str, int, Any], value: Any, state: dict[int, State]) -> None:
        where, index, key = place
        owner = self.optimizer.param_groups[index] if where == "group" else state[index]
        held = owner.get(key)
        if isinstance(held, torch.Tensor) and not isinstance(value, torch.Tensor):
            held.fill_(value)
        else:
            owner[key] = value
