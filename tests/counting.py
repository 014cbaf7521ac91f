"""How many collectives a stretch of code really ran, from torch's profiler, whoever started them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.profiler import ProfilerActivity, profile


@dataclass
class Count:
    """Filled when the block ends. Control messages of other kinds (gathers, broadcasts) count apart."""

    all_reduces: int = 0
    all_gathers: int = 0
    broadcasts: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    """Counts gloo's collectives on this rank inside the block."""
    found = Count()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        yield found
    names = [event.name for event in profiler.events()]
    found.all_reduces = names.count("gloo:all_reduce")
    found.all_gathers = names.count("gloo:all_gather")
    found.broadcasts = names.count("gloo:broadcast")
