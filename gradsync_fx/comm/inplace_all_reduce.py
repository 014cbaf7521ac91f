"""Two ops that reduce a bucket of running sums in place: one starts its all-reduce, the other waits for it.

start(sums, "sum", group, wire dtype)     the flat tensor below the sums (flat_buffers.py) goes out as it is
wait(sums)                                from here on they are reduced

Sums that do not lie in one stretch (a bucket by name, saved sums of another layout) are joined, and copied back. A wire
of another dtype is a copy of the bucket. What the ranks of one machine share never goes out (shm_all_reduce.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gradsync_fx.comm.flat_buffers import joined
from gradsync_fx.comm.shm_all_reduce import SharedBuckets, shared_buckets
from gradsync_fx.ir.ops import ALL_REDUCE_IN_PLACE, WAIT


_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define("start(Tensor(a!)[] sums, str op, str group, ScalarType wire) -> ()")
_LIBRARY.define("wait(Tensor(a!)[] sums) -> ()")

# What is under way, and among whom if it is shared, by the place of the first sum.
_travelling: dict[int, tuple[torch.Tensor, SharedBuckets | None]] = {}


def forget(sums: Iterable[torch.Tensor]) -> None:
    """The program that reduced these was cut off: nobody will wait for what it started."""
    for total in sums:
        _travelling.pop(total.data_ptr(), None)


def _start(sums: list[torch.Tensor], op: str, group: str, wire: torch.dtype) -> None:
    flat = joined(sums)
    if flat is None:
        flat = torch.cat([total.reshape(-1) for total in sums])
    flat = flat.to(wire)
    shared = shared_buckets()
    if shared is None or not shared.start(flat):
        ALL_REDUCE_IN_PLACE(flat, op, group)
        shared = None
    _travelling[sums[0].data_ptr()] = flat, shared


def _wait(sums: list[torch.Tensor]) -> None:
    reduced, shared = _travelling.pop(sums[0].data_ptr())
    if shared is not None:
        shared.wait(reduced)
        return
    WAIT(reduced)
    flat = joined(sums)
    if flat is None:
        parts = reduced.split([total.numel() for total in sums])
        for total, part in zip(sums, parts, strict=True):
            total.copy_(part.view(total.shape))
    elif flat.data_ptr() != reduced.data_ptr():
        flat.copy_(reduced)


_LIBRARY.impl("start", _start, "CompositeExplicitAutograd")
_LIBRARY.impl("wait", _wait, "CompositeExplicitAutograd")


@torch.library.register_fake("gradsync_fx::start", lib=_LIBRARY)
def _start_fake(sums: list[torch.Tensor], op: str, group: str, wire: torch.dtype) -> None:
    """Nothing is made."""


@torch.library.register_fake("gradsync_fx::wait", lib=_LIBRARY)
def _wait_fake(sums: list[torch.Tensor]) -> None:
    """Nothing is made."""


START_SUMS = torch.ops.gradsync_fx.start.default
WAIT_SUMS = torch.ops.gradsync_fx.wait.default
