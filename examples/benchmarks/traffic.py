"""What a rank sends: the collectives that it starts, by torch's profiler, and the bytes that leave its interface."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


@dataclass
class Traffic:
    """Of one window. payload: bytes that went into all-reduces, whoever started them (DDP's C++ reducer, a program)."""

    all_reduces: int = 0
    payload: int = 0
    others: int = 0
    others_payload: int = 0


def traffic_of(window: Callable[[], None]) -> dict[str, int]:
    """Runs a window under the profiler and counts."""
    # Shapes and dtypes of what a collective was given are only in the tree of events.
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        window()
    found = Traffic()
    for event in _events(profiler.profiler.kineto_results.experimental_event_tree()):
        name, payload = event.name, _payload(event)
        if name.startswith("c10d::allreduce"):
            found.all_reduces += 1
            found.payload += payload
        elif name.startswith("c10d::") and name != "c10d::barrier":
            found.others += 1
            found.others_payload += payload
    return asdict(found)


def _events(roots: list[Any]) -> Any:
    waiting = list(roots)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event


def _payload(event: Any) -> int:
    """Bytes of the tensors in an event's first argument."""
    inputs = getattr(event.typed[1], "inputs", None)
    first = inputs[0] if inputs else None
    total = 0
    for tensor in first if isinstance(first, list) else [first]:
        if hasattr(tensor, "sizes"):
            total += torch.Size(tensor.sizes).numel() * tensor.dtype.itemsize
    return total


def sent_bytes(interface: str) -> int:
    """Bytes that left through an interface of this process's network namespace so far, headers included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == interface:
            return int(numbers.split()[8])
    return 0
