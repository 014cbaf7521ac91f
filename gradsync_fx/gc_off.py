"""GC off: building a graph allocates thousands of live nodes, and each collection would rescan what Dynamo keeps."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_off() -> Iterator[None]:
    """Turns the garbage collector off for the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
