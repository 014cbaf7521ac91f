"""What every pass is given: the arithmetic of one captured step's window, and the tensors that it binds."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from gradsync_fx.ir.ops import LEAF_GRAD, argument
from gradsync_fx.ir.program import Step
from gradsync_fx.ir.regions import Regions
from gradsync_fx.optim.opaque import Opaque
from gradsync_fx.optim.shares import Portion
from gradsync_fx.optim.update import Update
from gradsync_fx.planning.kept import NOTHING, Invariants


@dataclass(frozen=True, slots=True)
class Reduction:
    """How one leaf's accumulated gradient becomes the window's.

    op: of the all-reduce.
    group: the process group's name; None for no all-reduce.
    divisor: what the sum is divided by afterwards. "ranks": the terms, or the weight, of all ranks; "local": the same
        over the number of ranks, for gradients that the user's own code averages.
    """

    op: str
    group: str | None
    divisor: str


@dataclass(frozen=True, slots=True)
class Bucket:
    """Leaves of one part that share one all-reduce. What it is at run time: comm/flat_bucket.py.

    leaves: leaf numbers, in the order in which their sums lie in the flat tensor.
    reduction: of each of them.
    part: of the window.
    """

    leaves: tuple[int, ...]
    reduction: Reduction
    part: int = 0


@dataclass(frozen=True, slots=True)
class Weighing:
    """What a micro-step's term counts, where that is known only when it runs.

    weighted: it counts the step's own weight.
    finite: it counts nothing where the loss or a gradient is not finite.
    divides: the sum is divided by the weight (not so for reduction="sum").
    dtype: of the running weight.
    """

    weighted: bool
    finite: bool
    divides: bool
    dtype: torch.dtype = torch.float64


@dataclass(slots=True)
class Plan:
    """All that passes need to know about one program of a captured step.

    A window has one part for each optimizer with a k of its own, else one part. A step keeps one plan in which nothing
    closes: `closing`, `updates`, `opaque` and `state_tensors` are empty. Each program is built from a copy in which
    these four, `masked` and `buckets` are its own. Passes change nothing in it.

    step, regions: as captured.
    buckets: all of the step's, in the order in which they are sent: as gradients become ready, or by name.
    part_of_leaf: by leaf number.
    part_of_update: by update marker.
    closing: parts that this program reduces and updates; the others accumulate.
    accumulators: running sums by parameter name. The runtime's own dict, shared by all steps of a window.
    weights: running weight by part, likewise; read only with `weighing`.
    weighing: None where every term counts 1.
    group: name of the process group over which weights are summed; None for one rank.
    world: ranks in it.
    updates: those that close and are traced, by `update_key`.
    opaque: those that close and run as they are, likewise.
    names: of parameters, by id.
    state_tensors: of each traced update, in the order of its state inputs.
    wire_dtype: of all-reduces; None for the sums' own.
    sync_each_batch: every call reduces its terms, so that sums hold what was reduced.
    masked: the program makes no update where no term of the window counted, which it sees itself (passes/mask.py).
    voted: the user decides, once the reductions have started, whether the update counts.
    arriving: parameters that may be on their way when a call begins, by bucket, in the order of the forward.
    beside: whether ranks that share updates out may reach each other's memory.
    pieces: by leaf number, where updates are shared out among the ranks: what each of them updates.
    rank: this one's number in the group, where that matters.
    invariants: what windows compute once, and this program reads; nothing by default.
    """

    step: Step
    regions: Regions
    buckets: tuple[Bucket, ...]
    part_of_leaf: dict[int, int]
    part_of_update: dict[Node, int]
    closing: frozenset[int]
    accumulators: Mapping[str, torch.Tensor]
    weights: dict[int, torch.Tensor]
    weighing: Weighing | None
    group: str | None
    world: int
    updates: dict[str, Update]
    opaque: dict[str, Opaque]
    names: dict[int, str]
    state_tensors: dict[str, list[torch.Tensor]]
    wire_dtype: torch.dtype | None
    sync_each_batch: bool
    masked: bool = False
    voted: bool = False
    arriving: tuple[tuple[str, ...], ...] = ()
    beside: bool = False
    pieces: dict[int, Portion] = field(default_factory=dict)
    rank: int = 0
    invariants: Invariants = NOTHING

    @property
    def parts(self) -> tuple[int, ...]:
        """Parts in which this step has a gradient, in ascending order."""
        return tuple(sorted({self.part_of_leaf[leaf] for leaf in self.regions.leaves}))

    def closing_buckets(self) -> Iterator[Bucket]:
        return (b for b in self.buckets if b.part in self.closing)

    def open_buckets(self) -> Iterator[Bucket]:
        return (b for b in self.buckets if b.part not in self.closing)

    def scatters(self, bucket: Bucket) -> bool:
        """Whether each rank is sent its pieces of a bucket's sums alone."""
        return not self.sync_each_batch and any(leaf in self.pieces for leaf in bucket.leaves)

    def is_open(self, sources: Iterable[Node]) -> bool:
        """Whether something that depends on these gradients and updates has to wait for a later program."""
        return not self.closing or any(self._part(n) not in self.closing for n in sources)

    def _part(self, source: Node) -> int:
        if source.target is LEAF_GRAD:
            return self.part_of_leaf[int(argument(source, 1))]
        return self.part_of_update[source]


@dataclass(frozen=True, slots=True)
class Sent:
    """One all-reduce: a bucket's sums, a part's weight, or both in one.

    bucket: None for a weight that is sent by itself.
    weight: the part whose weight this is; None for a bucket by itself.
    early: the buckets after it wait for it, as they are scaled by it.
    """

    bucket: Bucket | None
    weight: int | None = None
    early: bool = False


def scales_wire(plan: Plan) -> bool:
    """Whether sums are scaled for the wire by how many terms they hold: float16 ends at 65504."""
    return plan.wire_dtype is torch.float16 and plan.group is not None


def wire_scale(terms: float) -> float:
    """The power of 2 by which a sum of so many terms is no larger than their mean; 1 for none."""
    return 2.0 ** math.ceil(math.log2(terms)) if terms > 0 else 1.0


def sending_order(
    plan: Plan, buckets: Iterable[Bucket], weights: Collection[int], *, scaled: bool
) -> list[Sent]:
    """What goes over the ranks, in the order that is the same on all of them, whatever runs there.

    weights: parts whose weight is wanted. scaled: buckets need their part's weight before they are sent.
    """
    if scaled:
        first = [Sent(None, part, early=True) for part in weights]
        return [*first, *(Sent(bucket) for bucket in buckets)]
    carriers = {carrier(plan, part): part for part in weights}
    sent = [Sent(bucket, carriers.get(bucket)) for bucket in buckets]
    alone = [part for part in weights if carrier(plan, part) is None and plan.group is not None]
    return [*sent, *(Sent(None, part) for part in alone)]


def carrier(plan: Plan, part: int) -> Bucket | None:
    """The bucket that a part's weight is sent with; None where it goes alone (or nowhere, without a group)."""
    for bucket in plan.buckets:
        if plan.scatters(bucket):
            continue  # every rank needs the weight
        if bucket.part == part and bucket.reduction == Reduction("sum", plan.group, "ranks"):
            name = plan.step.leaves[bucket.leaves[0]].name
            wire = plan.wire_dtype or plan.accumulators[name].dtype
            if plan.group is not None and wire.itemsize >= 4:
                return bucket
    return None
