"""Binds an update to the user's optimizer: traced, it reads state and numbers and writes back what an update left.

The optimizer stays the user's object: what it holds is what the programs read and write. State that does not exist
before the first update is held back here until that update has happened. An update that a trace does not see wholly is
opaque (opaque.py): then nothing is read or written here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx._torch import compile_lock, copy_each, counted_by_scheduler, step_hooks
from gradsync_fx.errors import ShareError, UpdateError
from gradsync_fx.optim.footprint import Footprint
from gradsync_fx.optim.opaque import Opaque, given_by
from gradsync_fx.optim.reached import Unseen, is_torchs
from gradsync_fx.optim.rehearsal import difference
from gradsync_fx.optim.shares import Shares, created_elsewhere
from gradsync_fx.optim.state import State, in_groups, initial_state, parameters_of
from gradsync_fx.optim.trace import trace_update
from gradsync_fx.optim.update import Update
from gradsync_fx.progress import stage


log = logging.getLogger(__name__)
# Traces of one update, each with programs of its own, until it is opaque: flags may be toggled, but not without end.
MOST_TRACES = {True: 8, False: 5}  # by whether it is torch's own


def left_as_they_are(bindings: Iterable[Binding], failure: Exception) -> bool:
    """A program with these updates cannot be compiled: traces of anybody's classes are given up, if there are any."""
    found = [b for b in bindings if b.opaque is None and not is_torchs(b.optimizer)]
    first = (str(failure).strip().splitlines() or [""])[0][:200]
    for binding in found:
        binding.leave_as_it_is(f"its trace cannot be compiled ({type(failure).__name__}: {first})")
    return bool(found)


class Binding:
    """One `optimizer.step()` of a step: the parameters at positions `which` of one optimizer, and the window's part.

    given: the arguments of `step`, as text. shares: how its parameters are divided among ranks, where they are; shared:
    ids of those that are the same on all ranks.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        which: tuple[int, ...],
        given: str,
        decompositions: Any,
        part: int,
        shares: Shares | None = None,
        shared: frozenset[int] = frozenset(),
    ) -> None:
        self.optimizer, self.which, self.part = optimizer, which, part
        self.shares, self._shared = shares, shared
        self._given, self._decompositions = given, decompositions
        self._early: dict[int, State] = {}
        self._stateless: set[int] = set()
        self._traces: list[Update] = []
        self._opaque: Opaque | None = None
        self._numbers_out: tuple[Any, ...] = ()

    def state(self) -> dict[int, State]:
        """By position: what the optimizer holds, or will hold at its first update."""
        flat = parameters_of(self.optimizer)
        return {i: self.optimizer.state.get(flat[i]) or self._early.get(i, {}) for i in self.which}

    def shares_state(self, other: Binding) -> bool:
        """Whether one of them has to see what the other left in the optimizer."""
        if self.optimizer is not other.optimizer:
            return False
        if any(isinstance(binding.trace(), Opaque) for binding in (self, other)):
            return True
        return any(self.state()[i] for i in set(self.which) & set(other.which))

    @property
    def opaque(self) -> Opaque | None:
        """The update, where a trace was found not to see it wholly."""
        return self._opaque

    def leave_as_it_is(self, why: str) -> None:
        """The update is opaque from now on."""
        self._opaque = self._opaque or Opaque(self.optimizer, self.which, self._given, why)

    def trace(self) -> Update | Opaque:
        """The update as it is now: a trace that fits, made anew only when none does; or the optimizer's own step."""
        if self._opaque is None:
            try:
                self._check_outside()
                found = self._traced()
                if self.shares is not None:
                    self.shares.adopt(self._early, self._early)
                    self.shares.foreseen.update(self._early)
                return found
            except ShareError:
                raise
            except Unseen as unseen:
                why = str(unseen)
            except UpdateError as error:
                why = error.seen
            except (
                Exception
            ) as failure:  # of anybody's class: what cannot even be looked at runs as it is
                why = f"it cannot be looked at ({type(failure).__name__}: {failure})"
                log.info("looking at %s failed", type(self.optimizer).__name__, exc_info=failure)
            self.leave_as_it_is(why)
            log.info("%s", self._opaque)
        assert self._opaque is not None
        return self._opaque

    def _check_outside(self) -> None:
        """Raises `Unseen` for what stands around the class's code."""
        if not isinstance(getattr(self.optimizer, "state", None), dict):
            raise Unseen("it has no state of its own")
        if step_hooks(self.optimizer):
            raise Unseen("it has hooks of its step")
        replaced = vars(self.optimizer).get("step")
        if replaced is not None and not counted_by_scheduler(replaced):
            raise Unseen("its step was replaced on the object")
        if self.which[-1] >= len(in_groups(self.optimizer)):
            raise Unseen("it holds parameters that are in none of its groups")
        if any(given_by(self._given)[:2]):
            raise Unseen("its step is given arguments")

    def _traced(self) -> Update:
        state, footprint = self.state(), None
        missing = [i for i, held in state.items() if not held and i not in self._stateless]
        if missing:
            with self._on_stand_ins():
                footprint = self._foresee(missing)
            state = self.state()
        for known in self._traces:
            if known.fits(known.read_numbers(state), state):
                return known
        if len(self._traces) >= MOST_TRACES[is_torchs(self.optimizer)]:
            raise Unseen("what its code reads changes too often")
        with self._on_stand_ins(), stage(f"tracing {type(self.optimizer).__name__}.step"):
            self._traces.append(self._fresh(state, footprint))
        return self._traces[-1]

    def _fresh(self, state: dict[int, State], footprint: Footprint | None) -> Update:
        if self.shares is not None:
            state = {i: self.shares.whole_form(i, held) for i, held in state.items()}
        fresh = trace_update(self.optimizer, self.which, state, self._decompositions, footprint)
        numbers = fresh.read_numbers(state)
        assert numbers is not None
        fresh.lasting = fresh.lasts(numbers)
        torchs = fresh.footprint.torchs
        # A first update may be another than the rest; one that is another each time has no end of programs.
        if not fresh.lasting and any(not (torchs and known.lasting) for known in self._traces):
            raise Unseen("its arithmetic on Python numbers is another with every update")
        apart = "" if torchs else difference(fresh, state)
        if apart:
            raise Unseen(apart)
        if self.shares is not None:
            return self.shares.local(fresh, lambda p: id(p) in self._shared)
        return fresh

    @contextmanager
    def _on_stand_ins(self) -> Iterator[None]:
        """The optimizer's code runs, in one thread at a time: traces patch what it calls.

        Random numbers that it draws were not drawn.
        """
        devices = {p.device for p in parameters_of(self.optimizer) if p.device.type == "cuda"}
        with compile_lock, torch.random.fork_rng(devices=sorted(devices, key=str)):
            yield

    def _foresee(self, missing: list[int]) -> Footprint:
        """State that is not there (yet, or any more) at these positions, as the next update will make it."""
        footprint = Footprint(self.optimizer)
        try:
            found = initial_state(footprint, missing) or {}
        except Unseen:
            raise
        except Exception as failure:  # the optimizer's own code, on stand-ins
            footprint.raise_kept()
            log.debug("no start of %s is foreseen: %s", type(self.optimizer).__name__, failure)
            found = {}
        self._early.update({i: state for i, state in found.items() if state})
        self._stateless.update(i for i in missing if not found.get(i))
        return footprint

    def state_tensors(self, update: Update) -> list[torch.Tensor]:
        """The tensors that the update reads and writes, in its order."""
        state, groups, shares = self.state(), self.optimizer.param_groups, self.shares
        if shares is not None:
            shares.adopt(self.which, state)  # of a state that was loaded
            state = shares.parts(state)
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
        if update.makes_state:
            for place, value in zip(update.created, created, strict=True):
                self._put(place, value, state)
            for place, form in created_elsewhere(update):
                self._put(place, form, state)
        for places, value in zip(update.number_out, self._numbers_out, strict=True):
            self._put_number(places, value, state)
        if self._early or update.makes_state:
            for i in self.which:
                if state[i]:
                    self.optimizer.state[flat[i]] = state[i]
                if self.shares is not None:
                    self.shares.foreseen.pop(i, None)
            self._early.clear()
        self.optimizer._opt_called = True  # type: ignore[attr-defined]  # read by lr_scheduler

    def numbers_held(self, update: Update) -> Callable[[], None]:
        """Puts back the numbers that `commit` will change: for an update that turns out to have been none."""
        state = self.state()
        places = [self._owner(place, state) for places in update.number_out for place in places]
        held = [
            (owner, key, owner[key].clone() if isinstance(owner[key], torch.Tensor) else owner[key])
            for owner, key in places
            if key in owner
        ]

        def put_back() -> None:
            for owner, key, value in held:
                if isinstance(owner[key], torch.Tensor):
                    owner[key].copy_(value)
                else:
                    owner[key] = value

        return put_back

    def _owner(
        self, place: tuple[str, int, Any], state: dict[int, State]
    ) -> tuple[dict[Any, Any], Any]:
        where, index, key = place
        return (self.optimizer.param_groups[index] if where == "group" else state[index]), key

    def _put(
        self, place: tuple[str, int, Any], value: torch.Tensor, state: dict[int, State]
    ) -> None:
        owner, key = self._owner(place, state)
        owner[key] = value

    def _put_number(
        self, places: list[tuple[str, int, Any]], value: Any, state: dict[int, State]
    ) -> None:
        """A number, for each entry that holds it: a tensor of one element keeps its memory."""
        alike: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for place in places:
            owner, key = self._owner(place, state)
            held = owner.get(key)
            if isinstance(held, torch.Tensor):
                alike.setdefault((held.dtype, held.device), []).append(held)
            else:
                owner[key] = value
        # Filled one by one they take three times as long.
        for (dtype, device), held_by in alike.items():
            copy_each(held_by, [torch.full((), value, dtype=dtype, device=device)] * len(held_by))
