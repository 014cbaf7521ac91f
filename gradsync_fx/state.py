"""Saving and restoring an open window: plain tensors and numbers, the rank in the key of what differs by rank."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from gradsync_fx.errors import StateError
from gradsync_fx.window import WindowState


FORMAT = 1


@dataclass(frozen=True, slots=True)
class Restored:
    """What a saved state holds for one rank."""

    window: WindowState
    accumulators: dict[str, torch.Tensor]
    next_buffers: dict[str, torch.Tensor]
    in_window: list[str]


def pack(
    window: WindowState,
    k: int,
    rank: int,
    world: int,
    accumulators: dict[str, torch.Tensor],
    next_buffers: dict[str, torch.Tensor],
    in_window: list[str],
) -> dict[str, Any]:
    """A state dict; tensors are copies."""
    mine = {
        **asdict(window),
        "accumulators": {name: t.clone() for name, t in accumulators.items()},
        "in_window": dict.fromkeys(in_window, 1),
    }
    return {
        "format": FORMAT,
        "gradient_accumulation_steps": k,
        "world_size": world,
        "next_buffers": {name: t.clone() for name, t in next_buffers.items()},
        f"rank{rank}": mine,
    }


def unpack(given: dict[str, Any], k: int, rank: int, world: int) -> Restored:
    """Checks a state dict against this run.

    Raises `StateError`: another format; a rank that is not in it; with an open window, another k or world size.
    """
    if not isinstance(given, dict) or given.get("format") != FORMAT:
        found = given.get("format") if isinstance(given, dict) else type(given).__name__
        raise StateError(
            "state",
            seen=f"format {found!r}",
            wanted=f"format {FORMAT} of step.state_dict()",
            fix="load what step.state_dict() returned",
        )
    mine = given.get(f"rank{rank}")
    others = [r for r in given if r.startswith("rank")]
    pending = max([given[r]["pending"] for r in others], default=0)
    for name, here in (("gradient_accumulation_steps", k), ("world_size", world)):
        if pending and given[name] != here:
            raise StateError(
                name,
                seen=f"{given[name]} in the state, {here} here, with {pending} pending micro-steps",
                wanted="equal values while a window is open",
                fix="resume with the saved value, or save at a boundary",
            )
    if mine is None and pending:
        raise StateError(
            f"rank {rank}",
            seen=f"the state holds {', '.join(others)}",
            wanted=f"rank{rank}",
            fix="save on every rank, and load each rank's own state",
        )
    mine = mine or given[others[0]]
    counters = {n: int(mine[n]) for n in ("micro_step", "optimizer_step", "pending", "summed")}
    return Restored(
        WindowState(**counters),
        dict(mine["accumulators"]),
        dict(given["next_buffers"]),
        list(mine["in_window"]),
    )


def restore(name: str, accumulator: torch.Tensor, value: torch.Tensor) -> None:
    """Copies a saved sum into its accumulator. Raises `StateError` on another shape or dtype."""
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
    accumulator.copy_(value)


def foreign_state(name: str, known: list[str]) -> StateError:
    """The error for a parameter that only one of state and step has."""
    return StateError(
        f"accumulator {name!r}",
        seen="it is in only one of the saved state and this step",
        wanted=f"the parameters {', '.join(known[:5])}{', ...' if len(known) > 5 else ''}",
        fix="resume with the model that was saved",
    )
