"""The programs of a captured step as code for a target, inside of `absent`: with regions, FLOPs and estimated time.

Imported only where a target is named: it takes Triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from gradsync_fx.inspection.costs import Hardware
from gradsync_fx.inspection.data import OncePerWindow
from gradsync_fx.inspection.describe import region_of
from gradsync_fx.ir.flops import flops_of
from gradsync_fx.ir.program import Program
from gradsync_fx.lowering.target.absent import Binary
from gradsync_fx.lowering.target.cards import Card
from gradsync_fx.lowering.target.code import REGION, lowered, program_code
from gradsync_fx.lowering.target.made import ProgramCode, TargetCode
from gradsync_fx.options import Options
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.window import NONE


def target_code(
    captures: Sequence[CapturedStep],
    options: Options,
    card: Card,
    hardware: Hardware,
    binaries: Sequence[Binary],
) -> TargetCode:
    """Of the latest capture that reaches an update: accumulate, boundary and tail, and what runs once per window.

    binaries: of `absent`.
    """
    closing = [c for c in captures if c.updates][-1]
    adding = next((c for c in captures if not c.updates), closing)
    every = frozenset(range(len(options.steps)))
    wanted = [("boundary", closing, every, False), ("tail", closing, every, True)]
    if options.accumulates:
        wanted.insert(0, ("accumulate", adding, NONE, False))
    found = []
    for name, captured, parts, tail in wanted:
        program = captured.programs.build(parts, tail=tail)
        found.append(_code(name, captured, program, card, hardware, binaries))
    for name, program in adding.programs.build_held().items():
        found.append(_code(name, adding, program, card, hardware, binaries))
    return TargetCode(card.target, card.name, tuple(found))


def saved_on_target(
    captures: Sequence[CapturedStep],
    once: OncePerWindow,
    code: TargetCode,
    card: Card,
    hardware: Hardware,
    binaries: Sequence[Binary],
) -> OncePerWindow:
    """With the launches and bytes that an accumulate call is spared: beside the one in which nothing is held."""
    if not once.held:
        return once
    adding = next((c for c in captures if not c.updates), [c for c in captures if c.updates][-1])
    plain = _code("accumulate", adding, adding.programs.build_plain(), card, hardware, binaries)
    now = next(p for p in code.programs if p.name == "accumulate")
    return replace(once, launches=plain.launches - now.launches, moved=plain.bytes - now.bytes)


def _code(
    name: str,
    captured: CapturedStep,
    program: Program,
    card: Card,
    hardware: Hardware,
    binaries: Sequence[Binary],
) -> ProgramCode:
    originals = {n.name: n for n in captured.facts.capture.step.module.graph.nodes}
    flops = 0
    for node in program.module.graph.nodes:
        if node.op == "call_function":
            origin = originals.get(str(node.meta.get("origin", "")))
            node.meta[REGION] = region_of(captured, node, origin)
            flops += flops_of(node)
    made = lowered(program, captured.facts.capture.fake_mode, captured.facts.options)
    code = program_code(name, program, made, binaries)
    seconds = flops / hardware.flops + code.bytes / card.bandwidth
    return replace(code, flops=flops, seconds=seconds)
