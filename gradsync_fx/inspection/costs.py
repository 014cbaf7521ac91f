"""The cost model: estimates the time of a window from FLOPs, bytes and three numbers about the machine.

all-reduce of n bytes over R ranks, as a ring (Rabenseifner's alpha-beta model):
    2 (R - 1) alpha  +  2 (R - 1) / R * n / beta          alpha: seconds for a message, beta: bytes per second
micro-step:  FLOPs of its products and convolutions / (FLOPs per second), spread over its nodes
boundary:    a bucket's all-reduce starts when its last gradient is there and the wire is free; what is not done when
             backward ends is exposed, the rest is hidden. Without accumulation, every micro-step is such a boundary.

shared updates: a bucket's sums go to who needs them, half of an all-reduce; the new parameters are gathered behind the
             last of these, the other half: exposed, or but for the next forward's time where it hides them.

An estimate: no memory traffic, no host time, no time for the update. `calibrate` measures the three numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gradsync_fx.errors import OptionError


@dataclass(frozen=True, slots=True)
class Hardware:
    """latency: seconds of one message between two ranks. bandwidth: bytes per second of one rank's link. flops: per
    second and rank, as reached in training, not as advertised."""

    name: str
    latency: float
    bandwidth: float
    flops: float


PRESETS = {
    hardware.name: hardware
    for hardware in (
        Hardware("laptop", 30e-6, 2e9, 5e10),  # processes of one machine, a core each, loopback
        Hardware("cpu-1g", 100e-6, 1.17e8, 5e10),  # a core each, 1 Gbit/s Ethernet
        Hardware("t4-10g", 50e-6, 1.1e9, 2e13),  # NVIDIA T4, 10 Gbit/s Ethernet
        Hardware("a100-200g", 10e-6, 2.2e10, 1.5e14),  # A100, one 200 Gbit/s port each
        Hardware("a100-nvlink", 5e-6, 2.3e11, 1.5e14),  # A100 in one machine
        Hardware("h100-400g", 10e-6, 4.5e10, 4e14),  # H100, one 400 Gbit/s port each
        Hardware("h100-nvlink", 4e-6, 3.6e11, 4e14),  # H100 in one machine
        Hardware("b200-nvlink", 4e-6, 7.2e11, 9e14),  # B200 in one machine
    )
}
STEPS = (1, 2, 4, 8, 16, 32, 64)
HIDDEN = 0.05  # of a window's time: exposed communication below it counts as hidden


def find_hardware(given: str | Hardware) -> Hardware:
    """A preset by name, or the given one. Raises `OptionError` for a name that does not exist."""
    if isinstance(given, Hardware):
        return given
    if given not in PRESETS:
        raise OptionError(
            f"hardware {given!r}",
            seen="no such preset",
            wanted="one of "
            + ", ".join(PRESETS)
            + ", or a Hardware(name, latency, bandwidth, flops)",
            fix="pass a preset's name, or measure: gradsync_fx.calibrate(step, ...)",
        )
    return PRESETS[given]


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of the timeline, in seconds from the start of its call."""

    label: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds for one window on one rank, estimated.

    compute: all micro-steps. communication: the window's all-reduces. hidden: the part of it that backward overlaps.
    window: with accumulation; window_synced: when every micro-step reduces. speedup: (k, window_synced / window) for
    several k. hidden_from: the least k at which exposed communication is at most 5 % of a window; None where no k of
    the curve is enough. micro_step, boundary: segments of one call, compute and communication apart.
    """

    hardware: Hardware
    flops: int
    compute: float
    communication: float
    hidden: float
    window: float
    window_synced: float
    speedup: tuple[tuple[int, float], ...]
    hidden_from: int | None
    micro_step: tuple[Segment, ...]
    boundary: tuple[Segment, ...]


def all_reduce_seconds(size: int, ranks: int, hardware: Hardware) -> float:
    """Ring all-reduce of `size` bytes."""
    if ranks < 2:
        return 0.0
    hops = 2 * (ranks - 1)
    return hops * hardware.latency + hops / ranks * size / hardware.bandwidth


@dataclass(frozen=True, slots=True)
class Load:
    """What one micro-step has to do: FLOPs of forward and of all, and for each bucket the share of the step's FLOPs
    after which its gradients are there, with its bytes.

    gathered: bytes of new parameters, where updates are shared out among the ranks. hides: these may arrive under the
    next call's forward.
    """

    forward: int
    total: int
    buckets: tuple[tuple[str, float, int], ...]
    ranks: int
    gathered: int = 0
    hides: bool = False


def predict(load: Load, k: int, hardware: str | Hardware, *, sync_each: bool = False) -> Prediction:
    """The estimate for windows of k micro-steps."""
    machine = find_hardware(hardware)
    compute = load.total / machine.flops
    wire = _wire(load, compute, machine)
    reduced = max([compute, *(s.end for s in wire)])
    forward = load.forward / machine.flops
    gathered = all_reduce_seconds(load.gathered, load.ranks, machine) / 2
    gather = gathered if load.gathered else 0.0
    over = reduced + (max(0.0, gather - forward) if load.hides else gather)
    if gather:
        wire = [*wire, Segment("new parameters", reduced, reduced + gather)]
    exposed = over - compute

    def window(steps: int) -> float:
        return steps * over if sync_each else (steps - 1) * compute + over

    communication = sum(s.end - s.start for s in wire)
    curve = tuple((n, n * over / window(n) if over else 1.0) for n in STEPS)
    enough = (n for n in STEPS if exposed <= HIDDEN * window(n))
    calls = (Segment("forward", 0.0, forward), Segment("backward", forward, compute))
    return Prediction(
        hardware=machine,
        flops=load.total,
        compute=k * compute,
        communication=communication,
        hidden=communication - exposed,
        window=window(k),
        window_synced=k * over,
        speedup=curve,
        hidden_from=next(enough, None),
        micro_step=calls,
        boundary=(*calls, *wire),
    )


def _wire(load: Load, compute: float, machine: Hardware) -> Sequence[Segment]:
    segments, free = [], 0.0
    part = 0.5 if load.gathered else 1.0
    for label, share, size in load.buckets:
        start = max(free, share * compute)
        free = start + part * all_reduce_seconds(size, load.ranks, machine)
        segments.append(Segment(label, start, free))
    return segments
