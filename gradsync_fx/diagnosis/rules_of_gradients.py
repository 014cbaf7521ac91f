"""Rules about values: gradients scaled, clipped or zeroed at the wrong point, and the learning rate's schedule."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from gradsync_fx.diagnosis.events import Clip, Rescaled, Scheduled, Unscale, Zero
from gradsync_fx.diagnosis.findings import ERROR, WARNING, Finding
from gradsync_fx.diagnosis.windows import Loop, MicroStepSeen, Window, events_of
from gradsync_fx.wording import number_of


def _divided(loop: Loop) -> Iterator[Finding]:
    """The window's gradient is to be a mean: divided by k once, in the loss or in the gradients."""
    if loop.k < 2:
        return
    for window in loop.closed:
        if len(window.micro_steps) < 2:
            continue
        line = window.micro_steps[0].backward.line
        by_hand = events_of(Rescaled, window.rest)
        times = [_times(m, loop.k) for m in window.micro_steps]
        averaged = 0 if window.sent_by_hand else sum(_is(r.factor, loop.k) for r in by_hand)
        if min(times) + averaged >= 2:
            parts = [f"the loss {number_of(min(times), 'time')}"] * bool(min(times))
            parts += [f"the gradients {number_of(averaged, 'time')}"] * bool(averaged)
            accelerate = window.micro_steps[0].backward.by_accelerate
            yield Finding(
                "loss-divided-twice",
                ERROR,
                line,
                f"divided by micro_steps={loop.k} more than once: {', '.join(parts)}"
                + ("; accelerator.backward divides on its own" if accelerate else ""),
                f"one division by {loop.k}: the window's gradient is the mean over its micro-steps",
                "pass the undivided loss to accelerator.backward"
                if accelerate
                else "leave all but one out",
            )
        elif not any(_scaled(m, window) for m in window.micro_steps) and not events_of(
            Rescaled, window.all_events
        ):
            yield Finding(
                "loss-never-divided",
                WARNING,
                line,
                f"neither the loss nor the gradients are divided: the update's gradient is the sum of "
                f"{number_of(len(window.micro_steps), 'micro-step')}, not their mean",
                f"one division by {loop.k}, unless the sum is meant and the learning rate chosen for it",
                f"`(loss / {loop.k}).backward()` (with Accelerate: `accelerator.backward(loss)`, which divides)",
            )


def _times(micro_step: MicroStepSeen, k: int) -> int:
    """How often the loss is divided by k. Factors count where no division does: a loss may well have 0.5 in front."""
    divisions = micro_step.backward.divisions
    plain = sum(_is(d.number, k) + 2 * _is(d.number, k * k) for d in divisions if not d.factor)
    return plain or int(any(_is(d.number, k) for d in divisions if d.factor))


def _scaled(micro_step: MicroStepSeen, window: Window) -> bool:
    """Whether the loss is divided by anything: by tokens, say. A GradScaler's factor is no division."""
    scaler = any(s.scaler for s in window.steps)
    return any(not (scaler and d.number <= 1) for d in micro_step.backward.divisions)


def _is(number: float, k: int) -> bool:
    return math.isclose(number, k, rel_tol=1e-3)


def _clipped(loop: Loop) -> Iterator[Finding]:
    for window in loop.windows:
        for _, later in window.inner:
            for clip in events_of(Clip, later.lead):
                yield Finding(
                    "clip-inside-window",
                    ERROR,
                    clip.line,
                    "gradients are clipped in a micro-step that optimizer.step() does not follow: partial sums are "
                    "clipped, and those not reduced yet are clipped by another norm on each rank",
                    "one clip per window, between the last backward and optimizer.step()",
                    "clip under the condition that optimizer.step() is under (with Accelerate: "
                    "`if accelerator.sync_gradients:`)",
                )
        scaled = any(s.scaler for s in window.steps)
        ready = False
        for event in window.rest:
            ready |= isinstance(event, Unscale)
            if isinstance(event, Clip) and scaled and not ready:
                yield Finding(
                    "clip-before-unscale",
                    ERROR,
                    event.line,
                    "gradients are clipped while they carry the factor of GradScaler",
                    "scaler.unscale_(optimizer), then the clip, then scaler.step(optimizer)",
                    "call `scaler.unscale_(optimizer)` on the line before",
                )
    for window, events in loop.after_updates:
        for clip in events_of(Clip, events):
            yield Finding(
                "clip-after-step",
                ERROR,
                clip.line,
                f"gradients are clipped after optimizer.step() at {window.steps[-1].line}: the update was not clipped",
                "the clip between the last backward and optimizer.step()",
                "move the clip before optimizer.step()",
            )


def _zeroed(loop: Loop) -> Iterator[Finding]:
    trained = frozenset().union(*(w.parameters for w in loop.closed))
    for window in loop.windows:
        for earlier, later in window.inner:
            if _lost(earlier, later.backward.before, trained):
                zero = events_of(Zero, later.lead)
                yield Finding(
                    "zeroed-inside-window",
                    ERROR,
                    zero[0].line if zero else later.backward.line,
                    "gradients are zeroed between the micro-steps of a window: what came before is lost",
                    "zeroed once per window, after optimizer.step()",
                    "move zero_grad to where optimizer.step() is, right after it",
                )
        if window.steps and _lost(
            window.last, frozenset().union(*(s.held for s in window.steps)), trained
        ):
            zero = events_of(Zero, window.rest)
            yield Finding(
                "zeroed-before-step",
                ERROR,
                zero[-1].line if zero else window.steps[0].line,
                "gradients are zeroed between the last backward and optimizer.step(): the update has none",
                "zeroed after optimizer.step()",
                "move zero_grad after optimizer.step()",
            )
    for window, following in zip(loop.windows, loop.windows[1:], strict=False):
        if not following.micro_steps:
            continue
        stale = following.micro_steps[0].backward.before & window.parameters
        if stale:
            yield Finding(
                "never-zeroed",
                ERROR,
                window.steps[0].line,
                f"{len(stale)} of {number_of(len(window.parameters), 'parameter')} still have the last "
                "window's gradient when the next window begins: it is added again",
                "gradients zeroed after each update",
                "call optimizer.zero_grad() after optimizer.step()",
            )


def _lost(micro_step: MicroStepSeen, left: frozenset[int], trained: frozenset[int]) -> bool:
    """Whether none is left of the gradients that were there after a micro-step."""
    there = micro_step.backward.after & trained if trained else micro_step.backward.after
    return bool(there) and not there & left


def _scheduled(loop: Loop) -> Iterator[Finding]:
    for window in loop.windows:
        for _, later in window.inner:
            for schedule in events_of(Scheduled, later.lead):
                yield Finding(
                    "scheduler-per-micro-step",
                    ERROR,
                    schedule.line,
                    "the learning rate scheduler steps in a micro-step that is no update: it runs up to "
                    f"{loop.k} times too fast",
                    "one scheduler.step() for each optimizer.step(), after it",
                    "move scheduler.step() to where optimizer.step() is (with Accelerate: prepare the scheduler)",
                )


GRADIENT_RULES: tuple[Callable[[Loop], Iterator[Finding]], ...] = (
    _divided, _clipped, _zeroed, _scheduled,
)  # fmt: skip
