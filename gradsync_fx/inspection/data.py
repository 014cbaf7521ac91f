"""The data of a report. Text, page, JSON, DOT and networkx are views of it, each in a file of its own.

Counts and bytes are for one window and one rank unless a field says otherwise. before: every micro-step reduces its
gradients, as DDP does without `no_sync`. after: the programs of gradsync_fx.
"""

from __future__ import annotations

from dataclasses import dataclass

from gradsync_fx.inspection.costs import Prediction
from gradsync_fx.ir.journal import Entry
from gradsync_fx.lowering.target.made import TargetCode


@dataclass(frozen=True, slots=True)
class Region:
    """Nodes of the captured step with one role, and the user's lines that they stand for."""

    role: str
    nodes: int
    lines: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of the step's modules. trained: it receives a gradient in the captured step."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    trained: bool
    accumulator_dtype: str
    optimizer: str


@dataclass(frozen=True, slots=True)
class Collective:
    """One all-reduce of a bucket of gradients.

    bytes: what one rank puts in. programs: by name, the node's position among the program's nodes. nodes: by
    name in `graph`, the all-reduce itself and then the gradients that it reduces. way: "wire", or "memory" where ranks
    of one machine add it up there; "memory or wire" until they have met and found out; "memory and wire" where some
    parameters of it go another way. way_back: likewise of the new parameters, where updates are shared out; else empty.
    """

    bucket: int
    parameters: tuple[str, ...]
    op: str
    group: str
    ranks: int
    dtype: str
    bytes: int
    programs: dict[str, int]
    nodes: tuple[str, ...]
    way: str
    way_back: str


@dataclass(frozen=True, slots=True)
class Level:
    """One level of a reduction over a mesh. name: the mesh's, or "between machines" and "inside one". ranks: that meet
    in it. bytes: what one rank sends in it, in a window."""

    name: str
    ranks: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Sharing:
    """Updates that are shared out among the ranks, as this rank has them.

    state_bytes, whole_state_bytes: of the optimizers, here and without sharing. sums_bytes, parameters_bytes: given to
    other ranks in a window, terms of sums to those who need them and new parameters back. other_bytes: likewise, for
    norms and for what reads whole gradients. cut: parameters of which each rank has a piece. owners: the rank that has
    all of one.
    """

    state_bytes: int
    whole_state_bytes: int
    sums_bytes: int
    parameters_bytes: int
    other_bytes: int
    cut: tuple[str, ...]
    owners: dict[str, int]


@dataclass(frozen=True, slots=True)
class HeldValue:
    """What is held for a window. what: "value", which calls read; "copy", for linear work alone; "sum", ahead of such
    work. op: that computes it. of: names of the parameters and buffers that it is made of, or whose gradients it
    becomes. line: of the user's code. bytes: of one rank."""

    what: str
    op: str
    of: tuple[str, ...]
    line: str
    bytes: int


@dataclass(frozen=True, slots=True)
class OncePerWindow:
    """What a window computes once. found: values that do not change inside a window, kept or not. saved, calls: seconds
    of a window, estimated: what is saved, of what its calls would take. launches, moved: what each accumulate call no
    longer starts, and bytes that it no longer moves, in the code for a target; None without one."""

    found: int
    held: tuple[HeldValue, ...]
    saved: float
    calls: float
    launches: int | None = None
    moved: int | None = None

    @property
    def bytes(self) -> int:
        """Of one rank."""
        return sum(value.bytes for value in self.held)


@dataclass(frozen=True, slots=True)
class Kept:
    """A collective of the user's that stays where it is, and why."""

    op: str
    line: str
    why: str
    node: str


@dataclass(frozen=True, slots=True)
class Scale:
    """What the window's sum is divided by, and the dtypes on the way."""

    reduction: str
    formula: str
    accumulator_dtypes: tuple[str, ...]
    wire_dtypes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ProgramInfo:
    """One program. compile_seconds None: built for this report, not compiled. calls, seconds: measured, host time."""

    name: str
    nodes: int
    collectives: int
    compile_seconds: float | None
    calls: int
    seconds: float
    code: str


@dataclass(frozen=True, slots=True)
class GraphNode:
    """A node of the captured step. module: path of the submodule it belongs to, "" where there is none."""

    name: str
    op: str
    region: str
    module: str
    line: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    bytes: int
    parameter: str
    programs: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Bytes beside what is held at one place of a program, and the user's line there. at: share of it that has run."""

    at: float
    bytes: int
    line: str


@dataclass(frozen=True, slots=True)
class ProgramMemory:
    """The most bytes that one program takes at a time beside what is held, and the user's line that is run then.

    levels: over the program, in its order; a long one in stretches, the most of each.
    """

    name: str
    temporaries: int
    line: str
    levels: tuple[MemoryLevel, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one rank's memory, estimated from the graphs. held: between calls, by kind of tensor; and the batch."""

    held: dict[str, int]
    programs: tuple[ProgramMemory, ...]

    @property
    def peak(self) -> int:
        """The most at any time, of any program."""
        return sum(self.held.values()) + max(p.temporaries for p in self.programs)


@dataclass(frozen=True, slots=True)
class ReportData:
    """What a step does and what the rewrite changed. See the module's text for the units.

    levels: of the mesh, the slow one first; none without a mesh. sharing: None where no update is shared out. once:
    what a window computes once; None for a step that runs as it is. moved: calls of the step that run after the
    program, or that were dropped. memory: None for a step that runs as it is.
    code: made for a target; None without.
    """

    step: str
    line: str
    k: int | str
    world_size: int
    simulated: bool
    collectives_before: int
    collectives_after: int
    bytes_before: int
    bytes_after: int
    collectives: tuple[Collective, ...]
    levels: tuple[Level, ...]
    sharing: Sharing | None
    once: OncePerWindow | None
    kept: tuple[Kept, ...]
    refusals: tuple[str, ...]
    moved: tuple[str, ...]
    scale: Scale
    warnings: tuple[str, ...]
    unused_parameters: tuple[str, ...]
    parameters: tuple[Parameter, ...]
    regions: tuple[Region, ...]
    passes: tuple[Entry, ...]
    programs: tuple[ProgramInfo, ...]
    graph: tuple[GraphNode, ...]
    predicted: Prediction
    memory: Memory | None
    code: TargetCode | None
