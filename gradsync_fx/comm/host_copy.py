"""Numbers of a device on their way to the host: copied when they are there, and read later without waiting for more."""

from __future__ import annotations

from typing import Any

import torch


class HostCopy:
    """What a tensor holds as the device's queue stands now; a copy on the CPU already, for one of the CPU.

    The copy goes to pinned memory behind what is queued, and nobody waits for it. `values` waits for the copy, not for
    what was queued after it.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        self._event: torch.Event | None = None
        if tensor.device.type == "cpu":
            self._held = tensor.clone()
            return
        self._held = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        self._held.copy_(tensor, non_blocking=True)
        self._event = torch.Event(tensor.device)
        self._event.record()

    @property
    def on_host(self) -> bool:
        """Whether reading it waits for no device."""
        return self._event is None

    def values(self) -> list[Any]:
        """All of its numbers, flat."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[Any] = self._held.reshape(-1).tolist()
        return numbers
