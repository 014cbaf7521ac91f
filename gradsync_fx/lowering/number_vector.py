"""The numbers of a call on their way to a device: one vector, one copy that nobody waits for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class NumberVector:
    """The vector of one compiled program, on its device, at one address from the first call on.

    A call's numbers are put into a fresh tensor in pinned memory, and copied behind what the stream still has to do, so
    that kernels of the call before have read theirs. The pinned memory may be let go at once: torch's allocator hands
    it out again only when the copy, which it knows of by an event on the stream, is over.
    """

    def __init__(self, positions: tuple[int, ...], device: torch.device) -> None:
        self._positions, self._left_out = positions, frozenset(positions)
        self._device, self._vector = device, torch.empty(0)

    def inputs(self, args: list[Any]) -> list[Any]:
        """What the compiled program takes, for what the program takes: the numbers on the host, in one vector."""
        pinned = torch.tensor(
            [float(args[i]) for i in self._positions],
            dtype=torch.float64,
            pin_memory=self._device.type != "cpu",
        )
        if not self._vector.numel():
            self._vector = torch.empty_like(pinned, device=self._device, pin_memory=False)
        self._vector.copy_(pinned, non_blocking=True)
        return [*(a for i, a in enumerate(args) if i not in self._left_out), self._vector]


def with_vector(
    run: Callable[[list[Any]], Any], positions: tuple[int, ...], device: torch.device
) -> Callable[[list[Any]], Any]:
    """A compiled program that takes what the program takes."""
    vector = NumberVector(positions, device)
    return lambda args: run(vector.inputs(args))
