"""Makes a program's code for the device of `absent`, and says what came out of it.

with absent(card) as binaries:
    made = lowered(program, fake_mode, options)    # Inductor's modules: the program, and what it calls
    program_code(program, made, binaries)          # the same as data, for a report
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from torch.fx import Node

from gradsync_fx import _torch_cuda as parts
from gradsync_fx.ir.journal import Journal, Recording
from gradsync_fx.ir.ops import node_line
from gradsync_fx.ir.program import Program, writes
from gradsync_fx.lowering.lower import lower
from gradsync_fx.lowering.target.absent import Binary
from gradsync_fx.lowering.target.made import KernelCode, ProgramCode
from gradsync_fx.lowering.target.wrapper import HostEvent, Wrapper, read
from gradsync_fx.options import Options
from gradsync_fx.user_lines import NOWHERE


REGION = "region"  # in a node's meta, where a report wants to have it back
LAUNCHES = ("launch", "fill", "copy", "extern")


@dataclass(frozen=True, slots=True)
class Unit:
    """One graph that Inductor made code of.

    source: its module. origins: for each call, by Inductor's number, the nodes that it computes. bytes: read and
    written.
    """

    source: str
    origins: dict[int, tuple[Node, ...]]
    bytes: int


@dataclass(frozen=True, slots=True)
class LoweredUnits:
    """units: what Inductor made of a program, the program itself first. recording: of its main graph."""

    units: tuple[Unit, ...]
    recording: Recording


def lowered(program: Program, fake_mode: Any, options: Options) -> LoweredUnits:
    """Lowers a program as for this machine."""
    made: list[Unit] = []
    journal = Journal()
    with _collected(made):
        lower(program, fake_mode, options, journal)
    return LoweredUnits(tuple(made), journal.recordings[program.name])


@contextmanager
def _collected(made: list[Unit]) -> Iterator[None]:
    plain = parts.CompiledFxGraph.__init__

    def collecting(
        self: Any, function: Any, graph: Any, module: Any, *args: Any, **kw: Any
    ) -> None:
        plain(self, function, graph, module, *args, **kw)
        nodes = {n.name: n for n in module.graph.nodes}
        tracked = parts.nodes_of_kernels()
        origins = {
            int(call.rpartition(":")[2]): tuple(nodes[n] for n in names if n in nodes)
            for call, names in tracked.items()
        }
        tracked.clear()
        made.append(Unit(self.source_code, origins, int(graph.count_bytes()[0])))

    tracking = parts.inductor_config.patch({"trace.provenance_tracking_level": 1})
    with (
        tracking,
        mock.patch.object(parts.CompiledFxGraph, "__init__", collecting),
        # It would be made ready to run.
        mock.patch.object(parts.CompiledFxGraph, "post_compile", return_value=None),
    ):
        yield


def program_code(
    name: str, program: Program, made: LoweredUnits, binaries: Sequence[Binary]
) -> ProgramCode:
    """As data, without FLOPs and time. binaries: what Triton made, of other programs, too."""
    read_units = [(unit, read(unit.source)) for unit in made.units]
    events = [e for _, wrapper in read_units for e in wrapper.events]
    ends = {str(node.args[0]): node for node in writes(program.module)}
    kernels = [k for unit, wrapper in read_units for k in _kernels(unit, wrapper, binaries, ends)]
    return ProgramCode(
        name=name,
        kernels=tuple(kernels),
        launches=sum(e.kind in LAUNCHES for e in events),
        reductions=sum(e.kind == "reduce" for e in events),
        temporaries=sum(unit.source.count("= empty_strided_cuda(") for unit in made.units),
        recording=made.recording,
        bytes=sum(unit.bytes for unit in made.units),
    )


def _kernels(
    unit: Unit, wrapper: Wrapper, binaries: Sequence[Binary], ends: dict[str, Node]
) -> Iterator[KernelCode]:
    """In the order of their first launch. ends: the writes that end the program, by the input that each writes."""
    calls: dict[str, list[HostEvent]] = {}
    for event in wrapper.events:
        if event.kind in LAUNCHES:
            calls.setdefault(event.name, []).append(event)
    for name, launched in calls.items():
        nodes = [n for e in launched for n in unit.origins.get(e.call, ())]
        # Of a kernel over lists Inductor does not say what it computes.
        nodes = nodes or [ends[name] for e in launched for name in e.writes if name in ends]
        lines = (node_line(n) for n in nodes)
        found = KernelCode(
            name=name,
            kind="triton" if name in wrapper.kernels else "library",
            regions=tuple(dict.fromkeys(str(n.meta[REGION]) for n in nodes if REGION in n.meta)),
            lines=tuple(dict.fromkeys(line for line in lines if line != NOWHERE)),
            launches=len(launched),
        )
        yield _with_binary(found, wrapper, binaries) if found.kind == "triton" else found


def _with_binary(found: KernelCode, wrapper: Wrapper, binaries: Sequence[Binary]) -> KernelCode:
    cubin = next(b.cubin for b in binaries if b.kernel == found.name)
    registers, spilled = resources(cubin)
    return KernelCode(
        found.name,
        found.kind,
        found.regions,
        found.lines,
        found.launches,
        wrapper.kernels[found.name].source,
        registers,
        spilled,
        len(cubin),
    )


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack of one thread, as the cubin itself says; stack holds what registers spill."""
    tool = Path(parts.triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found is not None, text
    return int(found[1]), int(found[2])
