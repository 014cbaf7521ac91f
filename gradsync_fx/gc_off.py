"""The garbage collector, off while graphs are built: they are thousands of live objects, allocated at once."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_off() -> Iterator[None]:
    """Each collection would rescan everything that Dynamo keeps, and find no garbage."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
