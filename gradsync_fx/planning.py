"""From a capture to a plan: who reduces what over which group, in which buckets, divided by what."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx.capture import Capture
from gradsync_fx.errors import CaptureError
from gradsync_fx.options import Options
from gradsync_fx.plan import Bucket, Reduction
from gradsync_fx.regions import Regions


DEFAULT_CAP_MB = Options().bucket_cap_mb


@dataclass(frozen=True, slots=True)
class Setting:
    """What a capture and the options together say about the ranks."""

    group: ProcessGroup | None
    world: int
    rank: int
    bucket_bytes: int
    broadcast_buffers: str
    ignored: frozenset[str]


def find_setting(capture: Capture, options: Options) -> Setting:
    """The group: the argument's, else DDP's, else the default group if there is one, else none."""
    ddp = capture.ddp[0] if capture.ddp else None
    group = options.process_group
    if group is None and ddp is not None:
        group = ddp.process_group
    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    cap, broadcast = options.bucket_bytes, options.broadcast_buffers
    ignored: frozenset[str] = frozenset()
    if ddp is not None:
        if options.bucket_cap_mb == DEFAULT_CAP_MB:
            cap = int(ddp.bucket_bytes_cap)
        if not ddp.broadcast_buffers:
            broadcast = "never"
        ignored = frozenset(ddp.parameters_to_ignore)
        _refuse_hooks(ddp)
    world = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    return Setting(group if world > 1 else None, world, rank, cap, broadcast, ignored)


def _refuse_hooks(ddp: torch.nn.parallel.DistributedDataParallel) -> None:
    for _, hook in getattr(ddp, "_comm_hooks", []):
        raise CaptureError(
            f"communication hook {getattr(hook, '__qualname__', hook)!r}",
            seen="DDP's own reducer does not run in a compiled step, and so neither would its hook",
            wanted="no communication hook",
            fix="use reduce_dtype=torch.bfloat16 (or float16) for the stock compression hooks",
        )


def find_buckets(
    capture: Capture, regions: Regions, setting: Setting, options: Options
) -> tuple[Bucket, ...]:
    """Leaves in the order in which their gradients become ready, joined while dtype, device and reduction agree."""
    open_buckets: dict[object, tuple[list[int], int]] = {}
    done: list[tuple[object, list[int]]] = []
    for leaf in regions.leaves:
        parameter = capture.step.leaves[leaf].parameter
        reduction = _reduction(capture, regions, setting, leaf)
        dtype = options.reduce_dtype or accumulator_dtype(parameter, options)
        size = parameter.numel() * dtype.itemsize
        key = (reduction, accumulator_dtype(parameter, options), parameter.device)
        leaves, used = open_buckets.get(key, ([], 0))
        if leaves and used + size > setting.bucket_bytes:
            done.append((key, leaves))
            leaves, used = [], 0
        open_buckets[key] = ([*leaves, leaf], used + size)
    done += [(key, leaves) for key, (leaves, _) in open_buckets.items()]
    return tuple(Bucket(tuple(leaves), key[0]) for key, leaves in done)  # type: ignore[index]


def _reduction(capture: Capture, regions: Regions, setting: Setting, leaf: int) -> Reduction:
    hand = regions.hand.get(leaf)
    if hand is not None:
        return Reduction(hand.op, hand.group, "local")
    if leaf in regions.hand_flat:
        return Reduction("sum", None, "local")
    if setting.group is None or capture.step.leaves[leaf].name in setting.ignored:
        return Reduction("sum", None, "local")
    return Reduction("sum", setting.group.group_name, "ranks")


def accumulator_dtype(parameter: torch.Tensor, options: Options) -> torch.dtype:
    """float32 for parameters of lower precision, else the parameter's own, unless the option says otherwise."""
    if options.accumulator_dtype is not None:
        return options.accumulator_dtype
    return torch.float32 if parameter.dtype.itemsize < 4 else parameter.dtype


def layout_fingerprint(capture: Capture, buckets: tuple[Bucket, ...]) -> int:
    """A number that is equal on two ranks exactly when their buckets hold the same parameters in the same order."""
    text = repr(
        [
            [
                (capture.step.leaves[i].name, tuple(capture.step.leaves[i].parameter.shape))
                for i in b.leaves
            ]
            for b in buckets
        ]
    )
    return zlib.crc32(text.encode())
