"""What the runtime refuses: windows that cannot be closed, or whose length cannot be changed, as asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gradsync_fx.errors import (
    ForeignParameterError,
    NoBackwardError,
    NoGradientError,
    NoOptimizerError,
    ParallelismError,
    StateError,
    WindowError,
)
from gradsync_fx.options import Options, check_steps


# Steps that an eager run refuses, too.
EITHER_WAY = (
    NoOptimizerError,
    NoBackwardError,
    NoGradientError,
    ForeignParameterError,
    ParallelismError,
)


def used_in_commit(name: str) -> WindowError:
    return WindowError(
        f"step {name!r}",
        seen="it is used inside of commit: the window's sums are being reduced, and its update waits for the answer",
        wanted="a decision that needs nothing of the step but its counters",
        fix="keep what commit needs (the losses that the calls returned, say) where it can read it",
    )


def no_copies() -> StateError:
    """Of an optimized step: a copy would share the model with the original, and not its window."""
    return StateError(
        "an optimized step",
        seen="it is copied or pickled (deepcopy, torch.save, pickle): its programs hold this process's tensors",
        wanted="its state, or an optimized step of its own for each model",
        fix="save step.state_dict() (or step.save(path)), and load it into gradsync_fx.optimize(train_step, ...)",
    )


def nothing_captured(what: str) -> WindowError:
    return WindowError(
        what,
        seen="this rank has captured nothing yet that reaches an update",
        wanted=f"at least one call, or prepare, before {what}",
        fix="call step.prepare(...) first",
    )


def no_call_yet(ranks: list[int]) -> WindowError:
    return WindowError(
        f"the window of ranks {ranks}",
        seen="the step runs eagerly, and these ranks have not called it yet: how an update is made is seen in a call",
        wanted="one call of the step on every rank before a window is closed without data",
        fix="call the step once on every rank",
    )


def no_common_tail(ranks: list[int]) -> WindowError:
    return WindowError(
        f"the window of ranks {ranks}",
        seen="its micro-steps gave gradients to different parameters, and no one call of the step updates all of these",
        wanted="a branch of the step that updates every parameter that received a gradient in the window",
        fix="call the optimizers of all branches in each branch, or make a step of its own for each branch; where a "
        "rank has never called such a branch, call step.prepare(...) for it once, on every rank before training",
    )


def changed_steps(options: Options, k: Any, pending: int) -> Options:
    """The options with another window length. Raises `WindowError` inside a window, and for another kind of value."""
    check_steps(k)
    if pending and k != options.gradient_accumulation_steps:
        raise WindowError(
            "gradient_accumulation_steps",
            seen=f"k changed from {options.gradient_accumulation_steps} to {k} with {pending} "
            "pending micro-steps",
            wanted="a change between two windows",
            fix="call step.flush() or step.discard() first",
        )
    before = options.gradient_accumulation_steps
    mapped = isinstance(before, Mapping) and isinstance(k, Mapping) and set(before) == set(k)
    changed = options.with_steps({o: k[o] for o in before} if mapped else k)  # type: ignore[union-attr]
    alike = mapped or not (isinstance(before, Mapping) or isinstance(k, Mapping))
    if not alike or changed.manual != options.manual:
        raise WindowError(
            "gradient_accumulation_steps",
            seen=f"{options.gradient_accumulation_steps!r} became {k!r}",
            wanted="the same kind of value: a number, or a mapping of the same optimizers",
            fix="make a step of its own for it: gradsync_fx.optimize(train_step, ...)",
        )
    return changed


def another_object(culprit: str, what: str) -> WindowError:
    return WindowError(
        culprit,
        seen=f"this step was captured with {what} before",
        wanted="the same model and optimizer at every call",
        fix="make a step of its own for it: gradsync_fx.optimize(train_step, ...)",
    )
