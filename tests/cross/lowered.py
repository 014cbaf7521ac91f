"""Lowers the programs of a case for a GPU that is not there; what was made comes back as data."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.program import Program
from gradsync_fx.lowering import lower as lowering
from tests.cross.cases import Case
from tests.cross.device import Binary, absent
from tests.cross.faults import plant
from tests.cross.results import Lowered
from tests.cross.steps import captured, programs_of
from tests.cross.wrapper import Event, Wrapper, read


def lower(case: Case) -> dict[str, Lowered]:
    """The accumulate, the boundary and the tail program."""
    with absent(case.target, every_choice=case.every_choice) as binaries, captured(case) as step:
        wanted = programs_of(step)
        if case.fault:
            plant(case.fault, wanted["boundary"])
        found = {}
        for name, program in wanted.items():
            source = _source(program, step)
            found[name] = _data(name, case, program, source, binaries, len(step.facts.buckets))
        return found


def _source(program: Program, step: Any) -> str:
    """What Inductor makes of a program, compiled by Triton on the way."""
    inner, made = lowering.compile_fx_inner, list[str]()

    def kept(*args: Any, **kwargs: Any) -> Any:
        compiled = inner(*args, **kwargs)
        made.append(compiled.source_code)
        return compiled

    with mock.patch.object(lowering, "compile_fx_inner", kept):
        lowering.lower(program, step.facts.capture.fake_mode, step.facts.options, Journal())
    (source,) = made
    return source


def _data(
    name: str, case: Case, program: Program, source: str, binaries: list[Binary], buckets: int
) -> Lowered:
    wrapper = read(source)
    labels = [f"{slot.kind.value} {slot.name}" for slot in program.slots]
    values = program.inputs()
    holders = [n.name for n in program.module.graph.find_nodes(op="placeholder")]
    label = dict(zip(holders, labels, strict=True))
    devices = {
        label[holder]: v.device.type if isinstance(v, torch.Tensor) else "host"
        for holder, v in zip(holders, values, strict=True)
        if holder in wrapper.inputs
    }
    arches = [
        (b.kernel, re.findall(r"^\.target (\w+)", b.ptx, re.MULTILINE)[0], _size(b.cubin))
        for b in binaries  # of programs before this one, too: the same kernel is compiled once
        if b.kernel in wrapper.kernels
    ]
    return Lowered(
        name,
        case.target,
        devices,
        _labelled(wrapper, label),
        tuple(wrapper.kernels),
        tuple(arches),
        buckets,
        source,
    )


def _size(cubin: bytes) -> int:
    """Of what is an ELF file; 0 for anything else."""
    return len(cubin) if cubin.startswith(b"\x7fELF") else 0


def _labelled(wrapper: Wrapper, label: dict[str, str]) -> tuple[Event, ...]:
    assert set(wrapper.inputs) <= {*label, "numbers"}
    return tuple(
        replace(
            event,
            reads=tuple(label.get(n, n) for n in event.reads),
            writes=tuple(label.get(n, n) for n in event.writes),
        )
        for event in wrapper.events
    )
