"""What is known of one captured step before any program of it is built: its regions, ranks, buckets and parts.

a capture + the options -> facts      no program, no state of a window: nothing here changes afterwards
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup
from torch.fx import Node

from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.errors import CaptureError
from gradsync_fx.ir.deferral import check_weights
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.regions import Regions, find_regions
from gradsync_fx.options import Options
from gradsync_fx.planning.plan import Bucket, Weighing
from gradsync_fx.planning.setting import (
    Setting,
    find_buckets,
    find_parts,
    find_setting,
    layout_fingerprint,
    wire_bytes,
)
from gradsync_fx.planning.shareable import find_shareable


@dataclass(frozen=True, slots=True)
class CapturedFacts:
    """One captured step, as analysis and planning see it.

    options: as they were at the capture; k alone may be another by now. part_of_leaf, part_of_update: the part of the
    window that each gradient and each update belongs to. buckets: in the order in which gradients become ready;
    buckets_by_name: in one that is the same on ranks whose steps took different branches. layout: a number for the
    buckets, the same on ranks where they are. shareable: buckets that ranks of one machine may add up in shared memory.
    weighing: None where every micro-step counts alike. collectives: the step's own. names: all parameters that receive
    a gradient.
    """

    capture: Capture
    options: Options
    regions: Regions
    setting: Setting
    part_of_leaf: dict[int, int]
    part_of_update: dict[Node, int]
    buckets: tuple[Bucket, ...]
    buckets_by_name: tuple[Bucket, ...]
    layout: int
    shareable: tuple[Bucket, ...]
    weighing: Weighing | None
    collectives: OwnCollectives
    names: tuple[str, ...]

    @classmethod
    def of(cls, capture: Capture, options: Options, simulated: int | None = None) -> CapturedFacts:
        """simulated: a number of ranks to plan for that are not there.

        Raises `CaptureError` where the options ask for what the step does not have.
        """
        regions = find_regions(capture.step)
        setting = find_setting(capture, options, simulated)
        leaf_parts, update_parts = find_parts(capture, regions, options)
        buckets = find_buckets(capture, regions, setting, options, leaf_parts)
        real = isinstance(setting.group, ProcessGroup)  # none of simulated ranks are asked for
        if options.shard_optimizer and setting.group is not None:
            _check_reduced_here(capture, regions)
        if options.commit is not None:
            _check_refusable(capture, regions)
        return cls(
            capture=capture,
            options=options,
            regions=regions,
            setting=setting,
            part_of_leaf=leaf_parts,
            part_of_update=update_parts,
            buckets=buckets,
            buckets_by_name=find_buckets(
                capture, regions, setting, options, leaf_parts, by_name=True
            ),
            layout=layout_fingerprint(capture, buckets),
            shareable=find_shareable(capture, setting, options, buckets),
            weighing=_weighing(capture, regions, options),
            collectives=OwnCollectives.of(regions) if real else OwnCollectives(),
            names=tuple(capture.step.leaves[i].name for i in regions.leaves),
        )

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts in which this step has a gradient, in ascending order."""
        return tuple(sorted({self.part_of_leaf[leaf] for leaf in self.regions.leaves}))

    def names_of(self, parts: Iterable[int]) -> tuple[str, ...]:
        """Parameters of these parts of the window that receive a gradient in this capture."""
        wanted, leaves = set(parts), self.capture.step.leaves
        return tuple(leaves[i].name for i in self.regions.leaves if self.part_of_leaf[i] in wanted)

    @property
    def reduced(self) -> frozenset[str]:
        """Parameters whose gradients are reduced over the ranks of the window, and so stay the same on all of them."""
        name = self.setting.reduced_over
        return frozenset(
            self.capture.step.leaves[leaf].name
            for bucket in self.buckets
            if bucket.reduction.group == name
            for leaf in bucket.leaves
        )

    def bytes_sent(self, closing: Collection[int]) -> int:
        """What one rank gives to the reductions of these parts, and to the gathers of parameters that are shared."""
        name, leaves, total = self.setting.reduced_over, self.capture.step.leaves, 0
        for bucket in self.buckets:
            if name is None or bucket.part not in closing or bucket.reduction.group != name:
                continue
            for parameter in (leaves[i].parameter for i in bucket.leaves):
                total += wire_bytes(parameter, self.setting, self.options)
                total += parameter.nbytes * self.shares
        return total

    @property
    def shares(self) -> bool:
        """Whether updates are shared out among the ranks."""
        return self.options.shard_optimizer and self.setting.group is not None

    @property
    def arriving(self) -> tuple[tuple[str, ...], ...]:
        """Parameters that may be on their way when a call begins, by bucket, in the order of the forward."""
        if not self.shares or not self.options.overlap_param_gather:
            return ()
        leaves, shared = self.capture.step.leaves, self.reduced
        found = (
            tuple(name for i in bucket.leaves if (name := leaves[i].name) in shared)
            for bucket in reversed(self.buckets)
        )
        return tuple(names for names in found if names)

    @property
    def gathered_in_memory(self) -> dict[str, torch.Tensor]:
        """Parameters whose new values go through memory where the sums do, by name: not those that arrive later."""
        if not self.shares or self.options.overlap_param_gather:
            return {}
        leaves = self.capture.step.leaves
        return {leaves[i].name: leaves[i].parameter for b in self.shareable for i in b.leaves}

    @property
    def simulated(self) -> bool:
        """Whether its ranks are not there."""
        group = self.setting.group
        return group is not None and not isinstance(group, ProcessGroup)

    @property
    def shared_parameters(self) -> frozenset[int]:
        """By id: those that are `reduced`."""
        names, leaves = self.reduced, self.capture.step.leaves.values()
        return frozenset(id(leaf.parameter) for leaf in leaves if leaf.name in names)

    @property
    def updates(self) -> bool:
        """Whether the step changes a parameter: a call without an update can only accumulate."""
        return bool(self.regions.updates or self.regions.boundary_writes)

    @property
    def weighs(self) -> bool:
        """Whether the weights of a window are known only when its micro-steps have run."""
        return self.weighing is not None

    @property
    def masks(self) -> bool:
        """Whether its boundary program itself makes no update for a window in which nothing counted.

        Where programs are queued on a device, the host knows a weight only when all before it has run.
        """
        options, parameters = self.options, self.capture.parameters.values()
        whole = len(options.steps) == 1 and not options.sync_each_batch and not options.commit
        return self.weighs and whole and runs_behind(parameters)

    @property
    def speaks_in_every_call(self) -> bool:
        """Whether also an accumulate call meets the other ranks: it has collectives anyway, of ours or of its own."""
        if self.setting.group is None:
            return False
        return (
            self.options.sync_each_batch
            or (self.setting.broadcast_buffers == "every" and bool(self.setting.shared_buffers))
            or self.collectives.each_call > 0
        )

    def layout_for(self, in_window: Collection[str]) -> int:
        """The layout of the buckets; 0 where the open window holds a gradient that is in none of them."""
        return self.layout if set(in_window) <= set(self.names) else 0

    def certain(self, in_window: Collection[str], closing: Collection[int]) -> bool:
        """Whether each gradient that closes has a term that counts, whatever the weight of the call that comes.

        closing: no parts where the other ranks say which.
        """
        return not self.weighs or set(self.names_of(closing or self.parts)) <= set(in_window)


def runs_behind(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether programs of these are queued, and run behind the host."""
    return any(p.device.type != "cpu" for p in parameters)


def _check_reduced_here(capture: Capture, regions: Regions) -> None:
    """Raises `CaptureError` for gradients that the step itself reduces in a tensor of its own making."""
    if regions.hand_flat:
        name = capture.step.leaves[min(regions.hand_flat)].name
        raise CaptureError(
            f"shard_optimizer=True, gradient of {name!r}",
            seen="the step puts it into a tensor with others, and reduces that itself, to every rank as a whole",
            wanted="gradients that are reduced here, each piece to the rank that updates it",
            fix="leave that reduction out of the step, or shard_optimizer",
        )


def _check_refusable(capture: Capture, regions: Regions) -> None:
    """Raises `CaptureError` where an update cannot be refused: what forward wrote would have to stay without it."""
    for write in regions.early_writes:
        holders = list(capture.step.module.graph.find_nodes(op="placeholder"))
        name = capture.step.slots[holders.index(argument(write, 0))].name
        raise CaptureError(
            f"commit, parameter {name!r}",
            seen="the step writes it before the update, and the update writes it again",
            wanted="parameters that only the update writes, so that a refused one leaves them as they were",
            fix="leave commit out, or write the parameter after the update",
        )


def _weighing(capture: Capture, regions: Regions, options: Options) -> Weighing | None:
    weighted, finite = options.reduction == "weighted", options.skip_nonfinite
    if weighted and not capture.weighed:
        raise CaptureError(
            'reduction="weighted"',
            seen="the step does not say its weight",
            wanted="one call of gradsync_fx.micro_batch_weight(w) in the step",
            fix="call it with the number of tokens (or samples) of the micro-batch, in every branch of the step",
        )
    if not weighted and not finite:
        return None
    check_weights(capture.step, regions)
    return Weighing(weighted, finite, divides=options.reduction != "sum")
