"""Numbers on their way to the host: what was there when they were asked for, and nobody waits for anything else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync_fx.comm.host_copy import HostCopy


def test_it_is_what_was_there_then() -> None:
    tensor = torch.tensor([1, 2**52 + 1])
    copy = HostCopy(tensor)
    tensor.zero_()
    assert copy.values() == [1, 2**52 + 1]
    assert HostCopy(torch.tensor(0.1, dtype=torch.float64)).values() == [0.1]


def test_of_a_device_it_waits_for_its_own_event_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """With stand-ins for what the CPU does not have."""
    did: list[str] = []

    class Event:
        def __init__(self, device: torch.device) -> None:
            assert device.type == "cuda"

        def record(self) -> None:
            did.append("recorded")

        def synchronize(self) -> None:
            did.append("waited")

    class OnDevice(torch.Tensor):
        device = torch.device("cuda:0")  # type: ignore[assignment]

    class Pinned(torch.Tensor):
        def copy_(self, source: Any, non_blocking: bool = False) -> Any:
            did.append("queued" if non_blocking else "copied")
            return super().copy_(source.as_subclass(torch.Tensor))

    def empty(shape: Any, *, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        return torch.zeros(shape, dtype=dtype).as_subclass(Pinned)

    monkeypatch.setattr(torch, "Event", Event)
    monkeypatch.setattr(torch, "empty", empty)
    copy = HostCopy(torch.tensor([3.0, 4.0]).as_subclass(OnDevice))
    assert did == ["queued", "recorded"]
    assert copy.values() == [3.0, 4.0]
    assert did == ["queued", "recorded", "waited"]
