"""Which micro-batch fits into a card's memory, and what each costs: from two captures of a step.

Bytes and FLOPs of a graph's values are a + b n in the micro-batch n. Two captures, at two sizes, give a and b of each
node; the peak is found for every other size from these, without capturing again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch.fx import GraphModule, Node

from gradsync_fx.errors import CaptureError
from gradsync_fx.inspection.costs import Hardware, Load, predict
from gradsync_fx.inspection.flops import load_of
from gradsync_fx.inspection.held import graphs_of, held_by
from gradsync_fx.inspection.memory import Size, peak_of, value_bytes
from gradsync_fx.ir.ops import node_line
from gradsync_fx.ir.program import Program
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.window import NONE


@dataclass(frozen=True, slots=True)
class Choice:
    """One micro-batch. k: micro-steps for the global batch. held, temporaries, peak: bytes of one rank. sharded: the
    peak with shard_optimizer=True; None on one rank, and where that is refused. fits: whether peak is within the
    memory. window: seconds, estimated. rate: samples of the global batch in a second."""

    micro_batch: int
    k: int
    held: int
    temporaries: int
    sharded: int | None
    fits: bool
    window: float
    rate: float

    @property
    def peak(self) -> int:
        return self.held + self.temporaries


@dataclass(frozen=True, slots=True)
class Measure:
    """A captured step at one micro-batch. held: bytes by kind. load: of a micro-step."""

    micro_batch: int
    held: dict[str, int]
    graphs: tuple[GraphModule, ...]
    load: Load


def measure(captured: CapturedStep, micro_batch: int) -> Measure:
    """Of a capture with a batch of this size. It reaches an update."""
    programs: Mapping[str, Program] = {
        "accumulate": captured.programs.build(NONE),
        "boundary": captured.programs.build(frozenset(captured.facts.parts)),
    }
    graphs = tuple(g for p in programs.values() for g in graphs_of(captured, p))
    return Measure(micro_batch, held_by(captured, programs), graphs, load_of(captured))


Measures = tuple[Measure, Measure]


def choices(
    both: Measures, sharded: Measures | None, samples: int, memory: int, hardware: Hardware
) -> tuple[Choice, ...]:
    """One for each divisor of `samples`, those of one rank in a window; smallest micro-batch first.

    both: at a small micro-batch and at a larger one. sharded: the same with the updates shared out among the ranks.
    Raises `CaptureError` where the two graphs are not the same: then a size in between may have a third one.
    """
    for pair in (both, sharded):
        if pair is not None:
            _check_alike(*pair)
    found = []
    for micro_batch in (n for n in range(1, samples + 1) if samples % n == 0):
        k = samples // micro_batch
        held, temporaries = _bytes(both, micro_batch)
        load = _load(*both, micro_batch)
        window = predict(load, k, hardware).window
        rate = samples * load.ranks / window if window else 0.0
        fits = held + temporaries <= memory
        less = None if sharded is None else sum(_bytes(sharded, micro_batch))
        found.append(Choice(micro_batch, k, held, temporaries, less, fits, window, rate))
    return tuple(found)


def _bytes(both: Measures, micro_batch: int) -> tuple[int, int]:
    """What is held, and the most that a program takes beside that."""
    small, large = both
    held = sum(
        round(_between(small, large, micro_batch, small.held[kind], large.held[kind]))
        for kind in small.held
    )
    temporaries = max(
        peak_of(one, _sizes(one, two, small, large, micro_batch)).bytes
        for one, two in zip(small.graphs, large.graphs, strict=True)
    )
    return held, temporaries


def best(found: Sequence[Choice]) -> Choice | None:
    """The fastest that fits; of those within 1 % of it the largest micro-batch, which starts the fewest kernels."""
    fitting = [c for c in found if c.fits]
    if not fitting:
        return None
    fastest = min(c.window for c in fitting)
    return max((c for c in fitting if c.window <= 1.01 * fastest), key=lambda c: c.micro_batch)


def _between(small: Measure, large: Measure, n: int, one: float, two: float) -> float:
    """The straight line through both."""
    share = (n - small.micro_batch) / (large.micro_batch - small.micro_batch)
    return one + share * (two - one)


def _sizes(one: GraphModule, two: GraphModule, small: Measure, large: Measure, n: int) -> Size:
    found: dict[Node, int] = {}
    for a, b in zip(one.graph.nodes, two.graph.nodes, strict=True):
        found[a] = max(0, round(_between(small, large, n, value_bytes(a), value_bytes(b))))
    return found.__getitem__


def _load(small: Measure, large: Measure, n: int) -> Load:
    def between(one: float, two: float) -> int:
        return max(0, round(_between(small, large, n, one, two)))

    one, two = small.load, large.load
    total = between(one.total, two.total)
    buckets = []
    for (label, early, size), (_, late, _) in zip(one.buckets, two.buckets, strict=True):
        ready = between(early * one.total, late * two.total)
        buckets.append((label, min(1.0, ready / total) if total else 1.0, size))
    forward = between(one.forward, two.forward)
    return replace(one, forward=forward, total=total, buckets=tuple(buckets))


def _check_alike(small: Measure, large: Measure) -> None:
    sizes = f"{small.micro_batch} and {large.micro_batch}"
    for one, two in zip(small.graphs, large.graphs, strict=False):
        ours, theirs = list(one.graph.nodes), list(two.graph.nodes)
        for a, b in zip(ours, theirs, strict=False):
            if (a.op, str(a.target)) != (b.op, str(b.target)) and a.op != "placeholder":
                raise _apart(f"the code at {node_line(a)}", sizes)
        if len(ours) != len(theirs):
            raise _apart("the step", sizes)
    if len(small.graphs) != len(large.graphs):
        raise _apart("the step", sizes)


def _apart(culprit: str, sizes: str) -> CaptureError:
    return CaptureError(
        culprit,
        seen=f"it does other things with micro-batches of {sizes}",
        wanted="a step whose graph is the same for every micro-batch, so that sizes can be told from two",
        fix="have FACTORY return a larger batch, or look at one size with `gradsync-fx inspect`",
    )
