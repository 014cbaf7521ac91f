"""Saving and restoring an open window: plain tensors and numbers, the rank in the key of what differs by rank.

Every key is there at any time once the step was captured: `torch.distributed.checkpoint` loads into a dict of the full
shape, and leaves out what that dict does not have.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from gradsync_fx.errors import StateError
from gradsync_fx.options import Options
from gradsync_fx.runtime.other_ranks import ranks_in, taken_over
from gradsync_fx.runtime.window import Part, WindowState
from gradsync_fx.wording import number_of


FORMAT = 2


@dataclass(frozen=True, slots=True)
class Saved:
    """What a saved state holds for one rank."""

    window: WindowState
    sums: dict[str, torch.Tensor]
    weights: list[torch.Tensor]
    in_window: list[str]
    own_buffers: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    buffers_wait: bool


def pack(saved: Saved, steps: list[int], rank: int, world: int) -> dict[str, Any]:
    """A state dict; tensors are copies. steps: micro-steps in a window, for each part of it (0: the step decides)."""
    window = saved.window
    mine = {
        "micro_step": window.micro_step,
        "pending": [part.pending for part in window.parts],
        "summed": [part.summed for part in window.parts],
        "accumulators": {name: t.clone() for name, t in saved.sums.items()},
        "weights": torch.tensor([float(w) for w in saved.weights], dtype=torch.float64),
        "in_window": {name: int(name in saved.in_window) for name in saved.sums},
        "buffers": {name: t.clone() for name, t in saved.own_buffers.items()},
    }
    return {
        "format": FORMAT,
        "gradient_accumulation_steps": list(steps),
        "world_size": world,
        "optimizer_step": window.optimizer_step,
        "parameters": len(saved.sums),
        "buffers": {name: t.clone() for name, t in saved.buffers.items()},
        "buffers_wait": int(saved.buffers_wait),
        f"rank{rank}": mine,
    }


def unpack(
    given: Any, rank: int, world: int, options: Options, ignored: Collection[str] = ()
) -> Saved:
    """Checks a state dict against this run. ignored: parameters that are not reduced.

    Raises `StateError`: another format; keys that are foreign or missing; values that cannot be; sums that are not all
    there; a rank that is not in it; with an open window, another k, or a number of ranks that its sums do not allow.
    """
    steps = list(options.steps)
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        found = given.get("format") if isinstance(given, dict) else type(given).__name__
        raise StateError(
            "state",
            seen=f"format {found!r}",
            wanted=f"format {FORMAT} of step.state_dict()",
            fix="load what step.state_dict() returned; a state of another format was saved by another version of "
            "gradsync_fx: finish its window there, and save at a boundary",
        )
    others = ranks_in(key for key in given if isinstance(key, str))
    check_entries("state", {k: v for k, v in given.items() if k not in others}, ENTRIES)
    for name in others:
        check_entries(f"state of {name}", given[name], RANKS_ENTRIES)
    given = taken_over(given, rank, world, options, ignored)
    others = ranks_in(given)
    pending = max([max(given[r]["pending"]) for r in others], default=0)
    saved = given["gradient_accumulation_steps"]
    if pending and saved != steps:
        raise StateError(
            "gradient_accumulation_steps",
            seen=f"{_shown(saved)} in the state, {_shown(steps)} here, "
            f"with {number_of(pending, 'pending micro-step')}",
            wanted="equal values while a window is open",
            fix="resume with the saved value, or save at a boundary",
        )
    mine = given.get(f"rank{rank}")
    if mine is None and (pending or not others):
        raise StateError(
            f"rank {rank}",
            seen=f"the state holds {', '.join(others)}",
            wanted=f"rank{rank}",
            fix="save on every rank, and load each rank's own state",
        )
    mine = mine or given[others[0]]
    if len(mine["accumulators"]) != given["parameters"]:
        raise StateError(
            "accumulators",
            seen=f"{given['parameters']} were saved, {len(mine['accumulators'])} were loaded",
            wanted="a state of the full shape to load into",
            fix="call step.prepare(...), once for each branch of the step, before state_dict() and loading",
        )
    if len(mine["pending"]) != len(mine["summed"]) or len(mine["weights"]) != len(mine["pending"]):
        raise _unlikely(
            "state", "pending, summed and weights of different lengths", "one value for each part"
        )
    parts = [Part(int(p), int(s)) for p, s in zip(mine["pending"], mine["summed"], strict=True)]
    if len(parts) != len(steps):
        parts = [Part()] * len(steps)
    return Saved(
        WindowState(int(mine["micro_step"]), int(given["optimizer_step"]), tuple(parts)),
        dict(mine["accumulators"]),
        list(mine["weights"]),
        [name for name, flag in mine["in_window"].items() if flag],
        dict(mine["buffers"]) if f"rank{rank}" in given else {},
        dict(given["buffers"]),
        bool(given["buffers_wait"]),
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_count, value))


def _are_tensors(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(t, torch.Tensor) for t in value.values())


def _are_flags(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_count, value.values()))


def _is_vector(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 1 and value.is_floating_point()


# What a state of this format consists of, and what each value has to be.
ENTRIES: dict[str, Callable[[Any], bool]] = {
    "format": _is_count,
    "gradient_accumulation_steps": _are_counts,
    "world_size": _is_count,
    "optimizer_step": _is_count,
    "parameters": _is_count,
    "buffers": _are_tensors,
    "buffers_wait": _is_count,
}
RANKS_ENTRIES: dict[str, Callable[[Any], bool]] = {
    "micro_step": _is_count,
    "pending": _are_counts,
    "summed": _are_counts,
    "accumulators": _are_tensors,
    "weights": _is_vector,
    "in_window": _are_flags,
    "buffers": _are_tensors,
}


def check_entries(what: str, given: Any, entries: dict[str, Callable[[Any], bool]]) -> None:
    """Raises `StateError` for anything but exactly these keys, with values that can be theirs."""
    wanted = f"the keys {', '.join(entries)}"
    if not isinstance(given, dict):
        raise _unlikely(what, f"a value of type {type(given).__name__}", wanted)
    foreign = sorted(str(key) for key in given if key not in entries)
    missing = [key for key in entries if key not in given]
    if foreign or missing:
        told = [
            f"{', '.join(keys)} {how}"
            for keys, how in ((foreign, "is foreign"), (missing, "is missing"))
            if keys
        ]
        raise _unlikely(what, "; ".join(told), wanted)
    for key, value in given.items():
        if not entries[key](value):
            raise _unlikely(
                what, f"{key} is {str(value)[:60]}", "what step.state_dict() puts there"
            )


def _unlikely(what: str, seen: str, wanted: str) -> StateError:
    return StateError(
        what, seen=seen, wanted=wanted, fix="load what step.state_dict() returned, unchanged"
    )


def _shown(value: Any) -> str:
    """A list of one k as the number that the user passed."""
    if isinstance(value, list) and len(value) == 1:
        return str(value[0] or "'manual'")
    return str(value)


def check_fits(name: str, accumulator: torch.Tensor, value: torch.Tensor) -> None:
    """Raises `StateError` when a saved sum has another shape or dtype than its accumulator."""
    for what, saved, here in (
        ("shape", tuple(value.shape), tuple(accumulator.shape)),
        ("dtype", value.dtype, accumulator.dtype),
    ):
        if saved != here:
            raise StateError(
                f"accumulator {name!r}",
                seen=f"{what} {saved} in the state, {here} here",
                wanted=f"the same {what}",
                fix="resume with the model and dtypes that were saved",
            )


def foreign_state(name: str, known: list[str]) -> StateError:
    """The error for a parameter that only one of state and step has."""
    return StateError(
        f"accumulator {name!r}",
        seen="it is in only one of the saved state and this step",
        wanted=f"the parameters {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}",
        fix="resume with the model that was saved",
    )
