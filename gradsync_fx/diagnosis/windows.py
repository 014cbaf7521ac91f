"""Groups the recorded events of a loop into windows: micro-steps, and the update that closes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

from gradsync_fx.diagnosis.events import Backward, Event, Forward, SentByHand, Stepped


E = TypeVar("E", bound=Event)


def events_of(kind: type[E], events: Sequence[Event]) -> tuple[E, ...]:
    """The events of one kind."""
    return tuple(e for e in events if isinstance(e, kind))


@dataclass(frozen=True, slots=True)
class MicroStepSeen:
    """One backward. lead: all events since the backward or the update before it."""

    lead: tuple[Event, ...]
    backward: Backward

    @property
    def forwards(self) -> tuple[Forward, ...]:
        """Forwards of DDP modules, as DDP."""
        return tuple(f for f in events_of(Forward, self.lead) if not f.bypassed)

    @property
    def reduces(self) -> bool:
        """Whether DDP reduced in it: counted, or else inferred from how its forward was called."""
        if self.backward.collectives is not None:
            return self.backward.collectives > 0
        return any(f.synced for f in self.forwards)

    @property
    def late_no_sync(self) -> bool:
        """Whether a `no_sync` is around the backward, but not around the forward."""
        armed = bool(self.forwards) and all(f.synced for f in self.forwards)
        return bool(self.backward.no_sync) and armed and self.reduces


@dataclass(frozen=True, slots=True)
class Window:
    """rest: events after the last backward, before the update. steps: none where the window is still open."""

    micro_steps: tuple[MicroStepSeen, ...]
    rest: tuple[Event, ...]
    steps: tuple[Stepped, ...]

    @property
    def last(self) -> MicroStepSeen:
        """The micro-step before the update."""
        return self.micro_steps[-1]

    @property
    def parameters(self) -> frozenset[int]:
        """What the update changes."""
        return frozenset().union(*(s.parameters for s in self.steps))

    @property
    def inner(self) -> Iterator[tuple[MicroStepSeen, MicroStepSeen]]:
        """Neighbours inside of the window: a micro-step, and the one after it."""
        return zip(self.micro_steps, self.micro_steps[1:], strict=False)

    @property
    def all_events(self) -> tuple[Event, ...]:
        """Without the update and the backwards."""
        return (*(e for m in self.micro_steps for e in m.lead), *self.rest)

    @property
    def sent_by_hand(self) -> bool:
        """Whether a reduction of gradients outside of DDP came after the last backward."""
        return bool(events_of(SentByHand, self.rest))


@dataclass(frozen=True)
class Loop:
    """All that was seen of a loop.

    k: micro-steps wanted in a window. wrapped: parameters inside of DDP modules. cut: the watch ended before the loop.
    """

    windows: tuple[Window, ...]
    k: int
    world: int
    wrapped: frozenset[int]
    bytes: int
    sharded: bool
    cut: bool = False

    @cached_property
    def closed(self) -> tuple[Window, ...]:
        """Windows that ended with an update."""
        return tuple(w for w in self.windows if w.steps)

    @cached_property
    def micro_steps(self) -> int:
        """How many there were."""
        return sum(len(w.micro_steps) for w in self.windows)

    @property
    def after_updates(self) -> Iterator[tuple[Window, tuple[Event, ...]]]:
        """Each closed window with the events between its update and the next backward."""
        for window, later in zip(self.windows, (*self.windows[1:], None), strict=True):
            if window.steps and later is not None:
                yield window, later.micro_steps[0].lead if later.micro_steps else later.rest

    @property
    def apart(self) -> bool:
        """Whether there are several optimizers that do not step together."""
        sets = {frozenset(s.optimizer for s in w.steps) for w in self.closed}
        return len(sets) > 1

    @property
    def closures(self) -> tuple[Backward, ...]:
        """Micro-steps that an optimizer makes itself, inside of its step."""
        every = (m.backward for w in self.windows for m in w.micro_steps)
        return tuple(b for b in every if b.in_step)


def windows(events: Sequence[Event]) -> tuple[Window, ...]:
    """Cuts events at the updates. Optimizers that step without a backward in between close one window together."""
    trained = frozenset().union(*(s.parameters for s in events_of(Stepped, events)))
    found: list[Window] = []
    micro_steps: list[MicroStepSeen] = []
    pending: list[Event] = []
    for event in events:
        if isinstance(event, Backward):
            if trained and not event.reached & trained:
                continue  # of something that no optimizer here trains
            micro_steps.append(MicroStepSeen(tuple(pending), event))
        elif isinstance(event, Stepped) and micro_steps:
            found.append(Window(tuple(micro_steps), tuple(pending), (event,)))
            micro_steps = []
        elif isinstance(event, Stepped):
            if found:
                last = found[-1]
                found[-1] = Window(last.micro_steps, (*last.rest, *pending), (*last.steps, event))
        else:
            pending.append(event)
            continue
        pending = []
    if micro_steps or pending:
        found.append(Window(tuple(micro_steps), tuple(pending), ()))
    return tuple(found)
