"""The event types that are recorded of an eager loop, each with the user's line."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync_fx.diagnosis.graph import Division


@dataclass(frozen=True, slots=True)
class Event:
    """Something the loop did. line: the nearest `file:line` of the user's own code."""

    line: str


@dataclass(frozen=True, slots=True)
class Forward(Event):
    """A forward of a DDP module. synced: DDP armed its reducer in it. bypassed: of the module inside, without DDP."""

    synced: bool
    bypassed: bool


@dataclass(frozen=True, slots=True)
class Backward(Event):
    """A backward that reached parameters: a micro-step.

    no_sync: line of the `no_sync` it ran in, "" outside of any. collectives: really started in it, None where the group
    does not count them. divisions: what the loss is divided by. reached: parameters (by id) that it gave gradients.
    before, after: those whose gradient was not zero before it and after it. by_accelerate: called through
    `accelerator.backward`. in_step: made by an optimizer's own step, in a closure.
    """

    no_sync: str
    collectives: int | None
    divisions: tuple[Division, ...]
    reached: frozenset[int]
    before: frozenset[int]
    after: frozenset[int]
    by_accelerate: bool
    in_step: bool


@dataclass(frozen=True, slots=True)
class Stepped(Event):
    """An optimizer's step. held: its parameters whose gradient was not zero. scaler: made by a GradScaler."""

    optimizer: int
    parameters: frozenset[int]
    held: frozenset[int]
    scaler: bool


@dataclass(frozen=True, slots=True)
class Zero(Event):
    """`zero_grad` of an optimizer or a module."""


@dataclass(frozen=True, slots=True)
class Clip(Event):
    """`clip_grad_norm_` or `clip_grad_value_`."""


@dataclass(frozen=True, slots=True)
class Unscale(Event):
    """`GradScaler.unscale_` by the user; the one inside of `GradScaler.step` is no event."""


@dataclass(frozen=True, slots=True)
class Scheduled(Event):
    """The step of a learning rate scheduler."""


@dataclass(frozen=True, slots=True)
class Rescaled(Event):
    """Gradients changed by none of the above, by hand. factor: the norm before over the norm after."""

    factor: float


@dataclass(frozen=True, slots=True)
class SentByHand(Event):
    """Collectives outside of DDP that may carry gradients: a reduction by hand, or one that only the group saw."""
