"""Inputs come in the order of the slots, each from where it is kept, as it is when the call begins."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.runtime.program_inputs import ProgramInputs


SLOTS = (
    Slot(Kind.DATA, "x", 2),
    Slot(Kind.STATE, "step", ("adamw", 0)),
    Slot(Kind.ACCUMULATOR, "weight", "weight"),
    Slot(Kind.PARAMETER, "weight", 0),
    Slot(Kind.WEIGHT, "weight of part 0", 0),
    Slot(Kind.ACCUMULATOR, "bias", "bias"),
    Slot(Kind.INVARIANT, "held 1", 1),
    Slot(Kind.SCALAR, "divisor", ("divisor", "ranks", 0)),
)


@pytest.mark.parametrize("order", [SLOTS, SLOTS[::-1], SLOTS[:1], SLOTS[2:3], ()])
def test_inputs_are_bound_as_the_slots_say(order: tuple[Slot, ...]) -> None:
    args = [f"argument {i}" for i in range(4)]
    sums = {"bias": torch.zeros(1), "weight": torch.zeros(2), "unused": torch.zeros(3)}
    weights, kept = {0: torch.zeros(())}, [torch.zeros(4), torch.zeros(5)]
    held = {(slot.kind, slot.key): torch.ones(()) for slot in (SLOTS[1], SLOTS[7])}
    inputs = ProgramInputs(order)
    for _ in range(2):
        wanted: dict[Kind, Any] = {
            Kind.ACCUMULATOR: sums,
            Kind.WEIGHT: weights,
            Kind.INVARIANT: kept,
            Kind.STATE: {key: t for (_, key), t in held.items()},
            Kind.SCALAR: {key: t for (_, key), t in held.items()},
        }
        found = inputs.bind(args, sums, weights, kept, held)
        assert len(found) == len(order)
        for slot, value in zip(order, found, strict=True):
            assert value is wanted.get(slot.kind, args)[slot.key]
        weights[0], sums["bias"], args[2] = torch.ones(()), torch.ones(1), "another"
