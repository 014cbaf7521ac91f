"""Lowers the programs of a case for a GPU that is not there; what was made comes back as data."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch._inductor.async_compile import AsyncCompile

from gradsync_fx.ir.program import Program
from gradsync_fx.lowering.target.absent import Binary, absent
from gradsync_fx.lowering.target.cards import find_card
from gradsync_fx.lowering.target.code import LoweredUnits, lowered
from gradsync_fx.lowering.target.wrapper import HostEvent, Wrapper, read
from gradsync_fx.runtime.accumulators import Accumulators
from tests.cross.cases import Case
from tests.cross.faults import plant
from tests.cross.results import Lowered
from tests.cross.steps import captured, programs_of


_cubins: dict[tuple[str, str, str], tuple[Binary, ...]] = {}


def lower(case: Case) -> dict[str, Lowered]:
    """The accumulate, the boundary and the tail program."""
    card = find_card(f"cuda:{case.target}")
    with (
        absent(card, every_choice=case.cubins == "every") as binaries,
        kernels_of(case, binaries),
        captured(case) as step,
    ):
        wanted = programs_of(case, step)
        if case.fault:
            plant(case.fault, wanted["boundary"])
        found = {}
        for name, program in wanted.items():
            made = lowered(program, step.facts.capture.fake_mode, step.facts.options)
            found[name] = replace(
                _data(name, case, program, made, binaries, len(step.facts.buckets)),
                offsets=_offsets(step),
            )
        return found


@contextmanager
def kernels_of(case: Case, binaries: list[Binary]) -> Iterator[None]:
    """Kernels become cubins where the case says so, each once: those of one source and target are one, whatever their
    names. Else they stay sources: nothing here runs them."""
    make = AsyncCompile.triton

    def made(compiler: AsyncCompile, name: str, source: str, device_str: str = "cuda") -> None:
        if not case.cubins:
            return
        key = (source.replace(name, "kernel"), case.target, case.cubins)
        before = len(binaries)
        if key in _cubins:
            binaries.extend(replace(binary, kernel=name) for binary in _cubins[key])
        else:
            make(compiler, name, source, device_str)
            _cubins[key] = tuple(binaries[before:])

    with mock.patch.object(AsyncCompile, "triton", made):
        yield


def _data(
    name: str,
    case: Case,
    program: Program,
    made: LoweredUnits,
    binaries: Sequence[Binary],
    buckets: int,
) -> Lowered:
    wrappers = [read(unit.source) for unit in made.units]
    devices, sizes = _devices(program), _sizes(program)
    holders = [n.name for n in program.module.graph.find_nodes(op="placeholder")]
    label = dict(zip(holders, devices, strict=True))
    kernels = [kernel for wrapper in wrappers for kernel in wrapper.kernels]
    arches = [
        (b.kernel, re.findall(r"^\.target (\w+)", b.ptx, re.MULTILINE)[0], _size(b.cubin))
        for b in binaries  # of programs before this one, too: the same kernel is compiled once
        if b.kernel in kernels
    ]
    events = [*_labelled(wrappers[0], label, sizes)]
    for beside in wrappers[1:]:  # what the program calls: under names of its own
        events += beside.events
    return Lowered(
        program=name,
        target=case.target,
        inputs=devices,
        sizes=sizes,
        events=tuple(events),
        kernels=tuple(kernels),
        binaries=tuple(arches),
        buckets=buckets,
        source=made.units[0].source,
        recording=made.recording,
        offsets={},
    )


def _offsets(step: Any) -> dict[str, int]:
    """Of the sums as a run would allocate them."""
    facts = step.facts
    sums = Accumulators(len(facts.parts))
    sums.make_room(facts, facts.options)
    return {n: int(t.storage_offset()) * t.element_size() for n, t in sums.sums.items()}


def _devices(program: Program) -> dict[str, str]:
    """Kind and name of each input -> its device; of what is no tensor "size", or "host" for any other number."""

    def device(value: Any) -> str:
        if isinstance(value, torch.Tensor):
            return value.device.type
        return "size" if isinstance(value, int | torch.SymInt) else "host"

    found: dict[str, str] = {}
    for slot, value in zip(program.slots, program.inputs(), strict=True):
        name = f"{slot.kind.value} {slot.name}"
        alike = sum(n == name or n.startswith(f"{name} (") for n in found)  # a divisor for each k
        found[f"{name} ({alike + 1})" if alike else name] = device(value)
    return found


def _sizes(program: Program) -> dict[str, tuple[int, int]]:
    """Elements and bytes of each input on the device; of one whose size is a symbol none."""
    inputs = zip(_devices(program), program.inputs(), strict=True)
    return {
        label: (value.numel(), value.numel() * value.element_size())
        for label, value in inputs
        if isinstance(value, torch.Tensor)
        and value.device.type == "cuda"
        and type(value.numel()) is int
    }


def _size(cubin: bytes) -> int:
    """Of what is an ELF file; 0 for anything else."""
    return len(cubin) if cubin.startswith(b"\x7fELF") else 0


def _labelled(
    wrapper: Wrapper, label: dict[str, str], sizes: dict[str, tuple[int, int]]
) -> tuple[HostEvent, ...]:
    assert set(wrapper.inputs) <= {*label, "numbers"}
    width = {name: getattr(torch, dtype).itemsize for name, dtype in wrapper.dtypes.items()}
    for name, held in label.items():
        elements, whole = sizes.get(held, (0, 0))
        width[name] = whole // elements if elements else 0
    return tuple(
        replace(
            event,
            reads=tuple(label.get(n, n) for n in event.reads),
            writes=tuple(label.get(n, n) for n in event.writes),
            moved=tuple(
                (label.get(n, n), read * width.get(n, 0), written * width.get(n, 0))
                for n, read, written in event.moved
            ),
        )
        for event in wrapper.events
    )
