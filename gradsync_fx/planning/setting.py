"""What a capture and the options say about ranks: process group, buckets, reductions, accumulator dtypes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.fx import Node
from torch.nn.parallel import DistributedDataParallel

from gradsync_fx._torch import communication_hooks
from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.liveness import in_job
from gradsync_fx.comm.two_levels import TwoLevels
from gradsync_fx.errors import CaptureError, OptionError
from gradsync_fx.ir.ops import LEAF_GRAD, argument, node_line
from gradsync_fx.ir.regions import Regions
from gradsync_fx.optim.state import in_groups, parameters_of
from gradsync_fx.options import Options
from gradsync_fx.planning.levels import find_levels
from gradsync_fx.planning.plan import Bucket, Reduction


DEFAULT_CAP_MB = Options().bucket_cap_mb
MIB = 2**20
# The first bucket is DDP's size. On the CPU the others are small: an early start, and an update that overlaps the next
# bucket, gain more than gloo's latency costs.
FIRST_BYTES = MIB
USUAL_BYTES = {"cpu": 4 * MIB}


@dataclass(frozen=True, slots=True)
class Setting:
    """What a capture and the options together say about the ranks.

    levels: the group over which sums are reduced in two levels, where a mesh was given. ignored: parameters that are
    not reduced. shared_buffers: module buffers that get rank 0's values on other ranks.
    """

    group: ProcessGroup | None
    world: int
    rank: int
    bucket_bytes: int
    broadcast_buffers: str
    wire_dtype: torch.dtype | None
    ignored: frozenset[str]
    shared_buffers: dict[str, torch.Tensor]
    levels: TwoLevels | None = None

    @property
    def reduced_over(self) -> str | None:
        """The name of the group that sums of gradients are reduced over; None for one rank."""
        if self.levels is not None:
            return self.levels.registered
        return self.group.group_name if self.group is not None else None


@dataclass(frozen=True, slots=True)
class SimulatedGroup:
    """A process group that does not exist: programs for it are built for a report, and never run."""

    group_name: str = "simulated"


class Objects(Protocol):
    """What a step touches, by the names that its user knows: of a capture, of an eager step, of copies."""

    @property
    def ddp(self) -> tuple[DistributedDataParallel, ...]: ...
    @property
    def parameters(self) -> dict[str, torch.Tensor]: ...
    @property
    def buffers(self) -> dict[str, torch.Tensor]: ...


def find_setting(objects: Objects, options: Options, simulated: int | None = None) -> Setting:
    """The group: the argument's, else DDP's, else the default group if there is one, else none.

    A step with a DDP module is DDP's: what no such module holds, and what one was told to ignore, stays local, as in
    eager PyTorch. simulated: a number of ranks to plan for in place of the real ones.
    """
    ddp = objects.ddp[0] if objects.ddp else None
    group = options.process_group
    if group is None and ddp is not None:
        group = _group_of_all(objects.ddp)
    if group is None and in_job() is not None:
        group = dist.group.WORLD
    cap, broadcast = options.bucket_bytes, options.broadcast_buffers
    wire_dtype = options.reduce_dtype
    ignored: frozenset[str] = frozenset()
    buffers = objects.buffers
    if ddp is not None:
        if options.bucket_cap_mb == DEFAULT_CAP_MB:
            cap = int(ddp.bucket_bytes_cap)
        if not any(one.broadcast_buffers for one in objects.ddp):
            broadcast = "never"
        reduced = {id(p) for one in objects.ddp for p in _not_ignored(one, "named_parameters")}
        ignored = frozenset(n for n, p in objects.parameters.items() if id(p) not in reduced)
        kept = [one for one in objects.ddp if one.broadcast_buffers]
        sent = {id(b) for one in kept for b in _not_ignored(one, "named_buffers")}
        buffers = {name: b for name, b in buffers.items() if id(b) in sent}
        wire_dtype = wire_dtype or _wire(ddp)
    if simulated is not None:
        stand_in: Any = _stand_in(group, simulated) if simulated > 1 else None
        return Setting(stand_in, simulated, 0, cap, broadcast, wire_dtype, ignored, buffers)
    world = dist.get_world_size(group) if group is not None else 1
    rank = dist.get_rank(group) if group is not None else 0
    group = group if world > 1 else None
    levels = find_levels(options.device_mesh, group, objects.parameters.values())
    return Setting(group, world, rank, cap, broadcast, wire_dtype, ignored, buffers, levels)


def _stand_in(group: ProcessGroup | None, ranks: int) -> SimulatedGroup:
    """By the name of a group of as many ranks, where there is one: then its programs can be compiled, too."""
    if group is not None and dist.get_world_size(group) == ranks:
        return SimulatedGroup(group.group_name)
    return SimulatedGroup()


def _not_ignored(ddp: DistributedDataParallel, named: str) -> Iterator[torch.Tensor]:
    """The parameters, or buffers, that DDP was not told to ignore."""
    for name, tensor in getattr(ddp.module, named)():
        if name not in ddp.parameters_to_ignore:
            yield tensor


def _group_of_all(ddps: Sequence[DistributedDataParallel]) -> ProcessGroup:
    groups = {id(one.process_group): one.process_group for one in ddps}
    if len(groups) > 1:
        raise CaptureError(
            f"{len(ddps)} DistributedDataParallel modules",
            seen=f"{len(groups)} process groups: "
            + ", ".join(str(dist.get_process_group_ranks(g)) for g in groups.values()),
            wanted="one group of ranks for the gradients of a step",
            fix="build them with one process_group, or make a step of each",
        )
    return next(iter(groups.values()))


def shared_options(setting: Setting, options: Options) -> dict[str, object]:
    """Options that must be equal on all ranks, by name; k is not among them, as it is compared at every meeting."""
    return {
        "reduction": options.reduction,
        "skip_nonfinite": options.skip_nonfinite,
        "sync_each_batch": options.sync_each_batch,
        "shard_optimizer": options.shard_optimizer,
        "overlap_param_gather": bool(options.overlap_param_gather),
        "commit": "None" if options.commit is None else "given",
        "broadcast_buffers": setting.broadcast_buffers,
        "bucket_cap_mb": setting.bucket_bytes / MIB,
        "accumulator_dtype": options.accumulator_dtype,
        "reduce_dtype": setting.wire_dtype,
        "device_mesh": str(setting.levels.mesh.mesh.tolist()) if setting.levels else None,
        "gradient_accumulation_steps": f"{len(options.steps)} windows side by side",
    }


def _wire(ddp: DistributedDataParallel) -> torch.dtype | None:
    """The dtype of DDP's stock compression hook, if it has one; any other hook is refused."""
    for hook in communication_hooks(ddp):
        if hook is default_hooks.bf16_compress_hook:
            return torch.bfloat16
        if hook is default_hooks.fp16_compress_hook:
            return torch.float16
        if hook is not default_hooks.allreduce_hook:
            raise CaptureError(
                f"communication hook {getattr(hook, '__qualname__', hook)!r}",
                seen="DDP's own reducer does not run in a compiled step, and so neither would its hook",
                wanted="no communication hook, or one of torch's allreduce, fp16_compress and bf16_compress hooks",
                fix="use reduce_dtype=torch.bfloat16 (or float16) for compression",
            )
    return None


def part_of(parameter: torch.Tensor, options: Options) -> int:
    """The part of the window that a parameter belongs to: by its optimizer, where k is a mapping; -1 for none."""
    steps = options.gradient_accumulation_steps
    if not isinstance(steps, Mapping):
        return 0
    for held in (in_groups, parameters_of):
        for part, optimizer in enumerate(steps):
            if any(p is parameter for p in held(optimizer)):
                return part
    return -1


def find_parts(
    capture: Capture, regions: Regions, options: Options
) -> tuple[dict[int, int], dict[Node, int]]:
    """The part that each leaf and each update belongs to. Raises where k is a mapping that does not say it."""
    steps = options.gradient_accumulation_steps
    if not isinstance(steps, Mapping):
        return dict.fromkeys(regions.leaves, 0), dict.fromkeys(regions.updates, 0)
    number = {id(optimizer): part for part, optimizer in enumerate(steps)}
    leaves: dict[int, int] = {}
    for leaf in regions.leaves:
        part = part_of(capture.step.leaves[leaf].parameter, options)
        if part < 0:
            raise unmapped(f"parameter {capture.step.leaves[leaf].name!r}", "none of them holds it")
        leaves[leaf] = part
    updates: dict[Node, int] = {}
    for update in regions.updates:
        optimizer = capture.optimizers[int(argument(update, 0))]
        if id(optimizer) not in number:
            raise unmapped(type(optimizer).__name__, "the step calls it, and no k is given for it")
        updates[update] = number[id(optimizer)]
        for cut in regions.update_sources[update]:
            if cut in regions.updates or leaves[int(argument(cut, 1))] != updates[update]:
                raise _entangled(capture, update, cut)
    return leaves, updates


def unmapped(culprit: str, seen: str) -> OptionError:
    """The error for a mapping of k's that leaves something out."""
    return OptionError(
        culprit,
        seen=f"gradient_accumulation_steps is a mapping of optimizers, and {seen}",
        wanted="one k for each optimizer of the step",
        fix="add the optimizer to the mapping",
    )


def _entangled(capture: Capture, update: Node, cut: Node) -> CaptureError:
    optimizer = type(capture.optimizers[int(argument(update, 0))]).__name__
    name = (
        repr(capture.step.leaves[int(argument(cut, 1))].name)
        if cut.target is LEAF_GRAD
        else "another"
    )
    return CaptureError(
        f"{optimizer}, at {node_line(update)}",
        seen=f"its update reads the gradient of {name}, which belongs to an optimizer with a window of its own",
        wanted="optimizers whose gradients do not meet (in one clipping, say) when each has its own k",
        fix="clip each optimizer's parameters apart, or give them one k",
    )


def find_buckets(
    capture: Capture,
    regions: Regions,
    setting: Setting,
    options: Options,
    parts: dict[int, int],
    *,
    by_name: bool = False,
) -> tuple[Bucket, ...]:
    """Leaves of one part, stage, dtype, device and reduction share a bucket, until it is full.

    In the order in which their gradients become ready; or by name, which is the same order on ranks whose steps took
    different branches.
    """
    leaves = list(regions.leaves)
    if by_name:
        leaves.sort(key=lambda leaf: capture.step.leaves[leaf].name)
    open_buckets: dict[tuple[Any, ...], tuple[list[int], int]] = {}
    done: list[tuple[tuple[Any, ...], list[int]]] = []
    for leaf in leaves:
        parameter = capture.step.leaves[leaf].parameter
        reduction = _reduction(capture, regions, setting, leaf)
        held = accumulator_dtype(parameter, options)
        size = wire_bytes(parameter, setting, options)
        key = (
            reduction,
            parts[leaf],
            regions.stages[leaf],
            held,
            parameter.device,
        )
        members, used = open_buckets.pop(key, ([], 0))
        members, used = [*members, leaf], used + size
        # Closed once full, as DDP does: a small gradient beside large ones is never sent alone.
        if used >= _bytes_of_next(setting, parameter.device, first=not done):
            done.append((key, members))
        else:
            open_buckets[key] = (members, used)
    done += [(key, members) for key, (members, _) in open_buckets.items()]
    # A bucket's all-reduce starts after its last gradient: the tail program has to keep that order.
    done.sort(key=lambda item: leaves.index(item[1][-1]))

    def uneven(leaf: int) -> bool:
        return capture.step.leaves[leaf].parameter.numel() % 16 != 0

    # After one of them, the bucket's others would not start at a cache line.
    return tuple(
        Bucket(tuple(sorted(members, key=uneven)), key[0], key[1]) for key, members in done
    )


def _bytes_of_next(setting: Setting, device: torch.device, *, first: bool) -> int:
    """How many bytes close a bucket. Without a cap of the user's: few, so that sending starts early and little is left
    for the end."""
    cap = setting.bucket_bytes
    if cap != int(DEFAULT_CAP_MB * MIB):
        return cap
    return min(cap, FIRST_BYTES if first else USUAL_BYTES.get(device.type, cap))


def _reduction(capture: Capture, regions: Regions, setting: Setting, leaf: int) -> Reduction:
    hand = regions.hand.get(leaf)
    if hand is not None:
        return Reduction(hand.op, hand.group, "local")
    if leaf in regions.hand_flat:
        return Reduction("sum", None, "local")
    if setting.group is None or capture.step.leaves[leaf].name in setting.ignored:
        return Reduction("sum", None, "local")
    return Reduction("sum", setting.reduced_over, "ranks")


def wire_bytes(parameter: torch.Tensor, setting: Setting, options: Options) -> int:
    """Of its gradient in one reduction."""
    held = accumulator_dtype(parameter, options)
    dtype = setting.wire_dtype or held.to_real()
    return parameter.numel() * dtype.itemsize * (2 if held.is_complex else 1)


def accumulator_dtype(parameter: torch.Tensor, options: Options) -> torch.dtype:
    """float32 for parameters of lower precision, else the parameter's own, unless the option says otherwise.

    For a complex parameter the complex dtype of that precision, complex64 at least.
    """
    asked, own = options.accumulator_dtype, parameter.dtype
    if own.is_complex:
        if asked is None:
            return own if own.itemsize > 8 else torch.complex64
        return torch.complex128 if asked is torch.float64 else torch.complex64
    return asked or (torch.float32 if own.itemsize < 4 else own)


def layout_fingerprint(capture: Capture, buckets: tuple[Bucket, ...]) -> int:
    """A number that is equal on two ranks exactly when their buckets hold the same parameters in the same order."""
    leaves = capture.step.leaves
    text = repr(
        [[(leaves[i].name, tuple(leaves[i].parameter.shape)) for i in b.leaves] for b in buckets]
    )
    return zlib.crc32(text.encode()) or 1  # 0 stands for gradients that no one layout covers
