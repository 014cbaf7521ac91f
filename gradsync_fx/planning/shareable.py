"""Which buckets the ranks of one machine could reduce in shared memory, judged by one rank (shm_all_reduce.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.rendezvous import is_gloo
from gradsync_fx.ir.program import Leaf
from gradsync_fx.options import Options
from gradsync_fx.planning.plan import Bucket
from gradsync_fx.planning.setting import MIB, Setting, accumulator_dtype


# Of all buckets together: below this, the two meetings of the ranks take longer than sending.
LEAST_BYTES = MIB


def find_shareable(
    capture: Capture, setting: Setting, options: Options, buckets: Sequence[Bucket]
) -> tuple[Bucket, ...]:
    """Buckets of sums on the CPU that gloo would reduce, over the group in which the ranks meet.

    Terms keep their dtype on the way, but where updates are shared out: each is rounded as it would be for the wire.
    """
    group = setting.group
    if not isinstance(group, dist.ProcessGroup) or not is_gloo(group):
        return ()
    if options.backend != "inductor" or options.sync_each_batch:
        return ()  # nothing is reduced in place
    if {"in_place", "shared_memory"} & set(options.without):
        return ()
    leaves = capture.step.leaves

    def fits(bucket: Bucket) -> bool:
        reduction, parameters = bucket.reduction, [leaves[i].parameter for i in bucket.leaves]
        dtype = accumulator_dtype(parameters[0], options)
        return (
            (reduction.op, reduction.group) == ("sum", group.group_name)
            and all(p.device.type == "cpu" for p in parameters)
            and _keeps(dtype, setting.wire_dtype, options)
            and not dtype.is_complex  # it is sent as pairs of real numbers
            and any(p.numel() for p in parameters)  # an empty bucket cannot be mapped
        )

    found = tuple(bucket for bucket in buckets if fits(bucket))
    return found if sum(bytes_of(found, leaves, options)) >= LEAST_BYTES else ()


def _keeps(dtype: torch.dtype, wire: torch.dtype | None, options: Options) -> bool:
    """Whether memory can stand for a wire of this dtype: float16 has sums scaled, for it ends at 65504."""
    return wire in (None, dtype) or options.shard_optimizer and wire is not torch.float16


def bytes_of(buckets: Sequence[Bucket], leaves: Mapping[int, Leaf], options: Options) -> list[int]:
    """The size of each bucket's sums."""
    found = []
    for bucket in buckets:
        parameters = [leaves[i].parameter for i in bucket.leaves]
        dtype = accumulator_dtype(parameters[0], options)
        found.append(sum(p.numel() for p in parameters) * dtype.itemsize)
    return found
