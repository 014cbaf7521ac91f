"""What a step takes of one rank's memory: what it holds between calls, and each program beside that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from gradsync_fx.inspection.data import Memory, MemoryLevel, ProgramMemory
from gradsync_fx.inspection.memory import Peak, levels_over
from gradsync_fx.inspection.tensors import size_in_bytes
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import node_line
from gradsync_fx.ir.program import Kind, Program
from gradsync_fx.lowering.in_stages import in_stages
from gradsync_fx.lowering.lower import as_it_is
from gradsync_fx.passes import FOR_INDUCTOR, FOR_OTHERS, rewrite
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.user_lines import NOWHERE


STRETCHES = 120  # of a program, at the most
HELD = (
    Kind.PARAMETER,
    Kind.BUFFER,
    Kind.ACCUMULATOR,
    Kind.WEIGHT,
    Kind.STATE,
    Kind.DATA,
    Kind.INVARIANT,
)


def memory_of(captured: CapturedStep, programs: Mapping[str, Program]) -> Memory:
    """In bytes, estimated. programs: by name, the boundary among them."""
    held = held_by(captured, programs)
    found = tuple(_program_memory(captured, name, p) for name, p in programs.items())
    return Memory(held, tuple(sorted(found, key=lambda p: p.name)))


def held_by(captured: CapturedStep, programs: Mapping[str, Program]) -> dict[str, int]:
    """Bytes by kind of input; parameters and buffers that no program reads are held, too."""
    capture = captured.facts.capture
    found: dict[tuple[str, Any], int] = {}
    for kind, tensors in (("parameter", capture.parameters), ("buffer", capture.buffers)):
        found.update({(kind, name): size_in_bytes(t) for name, t in tensors.items()})
    for program in programs.values():
        for slot, value in zip(program.slots, program.inputs(), strict=True):
            named = slot.kind in (Kind.PARAMETER, Kind.BUFFER)
            key = (slot.kind.value, slot.name if named else slot.key)
            if slot.kind in HELD and isinstance(value, torch.Tensor):
                found.setdefault(key, size_in_bytes(value))
    totals = dict.fromkeys((kind.value for kind in HELD), 0)
    for (kind, _), size in found.items():
        totals[kind] += size
    return {kind: size for kind, size in totals.items() if size}


def graphs_of(captured: CapturedStep, program: Program) -> list[torch.fx.GraphModule]:
    """What a compiler is handed of a program: one graph, or one for each stretch between optimizers' own steps."""
    options, capture = captured.facts.options, captured.facts.capture
    found: list[torch.fx.GraphModule] = []

    def one(stage: Program) -> Any:
        passes = FOR_INDUCTOR if options.backend == "inductor" else FOR_OTHERS
        without = options.without if options.backend == "inductor" else ()
        if as_it_is(options):
            found.append(stage.module)
        else:
            journal = Journal()
            found.append(rewrite(stage, capture.fake_mode, journal, passes, without).main)

    in_stages(program, one, {**capture.buffers, **capture.parameters}, Journal())
    return found


def _program_memory(captured: CapturedStep, name: str, program: Program) -> ProgramMemory:
    found = [level for graph in graphs_of(captured, program) for level in levels_over(graph)]
    peak = max(found, key=lambda level: level.bytes, default=Peak(0, None))
    return ProgramMemory(name, peak.bytes, _line(peak), tuple(_stretches(found)))


def _stretches(levels: Sequence[Peak]) -> Iterator[MemoryLevel]:
    """As many as a drawing has room for, each with its most."""
    length = -(-len(levels) // STRETCHES) or 1
    for start in range(0, len(levels), length):
        most = max(levels[start : start + length], key=lambda level: level.bytes)
        yield MemoryLevel(start / len(levels), most.bytes, _line(most))


def _line(level: Peak) -> str:
    line = node_line(level.node) if level.node is not None else NOWHERE
    return "" if line == NOWHERE else line
