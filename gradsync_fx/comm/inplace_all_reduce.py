"""Two ops that reduce a bucket of running sums in place: one starts its all-reduce, the other waits for it.

start(sums, "sum", group, wire dtype)     the bucket (flat_bucket.py) is sent, or added up in memory
wait(sums)                                from here on the sums are reduced

They are called in a program of a captured step, whose buckets are in use then.
"""

from __future__ import annotations

import torch

from gradsync_fx.comm.flat_bucket import buckets_in_use


_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define("start(Tensor(a!)[] sums, str op, str group, ScalarType wire) -> ()")
_LIBRARY.define("wait(Tensor(a!)[] sums) -> ()")


def _start(sums: list[torch.Tensor], op: str, group: str, wire: torch.dtype) -> None:
    buckets_in_use().start(sums, op, group, wire)


def _wait(sums: list[torch.Tensor]) -> None:
    buckets_in_use().wait(sums)


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
