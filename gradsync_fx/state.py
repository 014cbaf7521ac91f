"""Saving and restoring an open window: plain tensors and numbers, the rank in the key of what differs by rank.

Every key is there at any time once the step was captured: `torch.distributed.checkpoint` loads into a dict of the full
shape, and leaves out what that dict does not have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gradsync_fx.errors import StateError
from gradsync_fx.window import Part, WindowState


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


def unpack(given: Any, steps: list[int], rank: int, world: int) -> Saved:
    """Checks a state dict against this run.

    Raises `StateError`: another format; sums that are not all there; a rank that is not in it; with an open window,
    another k or world size.
    """
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        found = given.get("format") if isinstance(given, dict) else type(given).__name__
        raise StateError(
            "state",
            seen=f"format {found!r}",
            wanted=f"format {FORMAT} of step.state_dict()",
            fix="load what step.state_dict() returned",
        )
    others = [r for r in given if r.startswith("rank")]
    pending = max([max(given[r]["pending"]) for r in others], default=0)
    for name, here in (("gradient_accumulation_steps", steps), ("world_size", world)):
        if pending and given[name] != here:
            raise StateError(
                name,
                seen=f"{_shown(given[name])} in the state, {_shown(here)} here, with {pending} pending micro-steps",
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
