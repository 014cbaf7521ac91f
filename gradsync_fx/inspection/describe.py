"""Builds the report of a captured step, from its graph and its programs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from gradsync_fx.capture.trace_state import readable
from gradsync_fx.errors import WindowError
from gradsync_fx.inspection.costs import Hardware, predict
from gradsync_fx.inspection.data import (
    Collective,
    GraphNode,
    Kept,
    ProgramInfo,
    Region,
)
from gradsync_fx.inspection.flops import load_of
from gradsync_fx.inspection.held import memory_of
from gradsync_fx.inspection.in_both import shared_nodes
from gradsync_fx.inspection.levels import levels_of
from gradsync_fx.inspection.once import graph_of_prologue, once_of
from gradsync_fx.inspection.remarks import remarks
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.shares import sharing_of, way_back_of, way_of
from gradsync_fx.inspection.tensors import (
    dtype_name,
    parameters,
    scale,
    size_in_bytes,
    sizes,
)
from gradsync_fx.ir import ops
from gradsync_fx.ir.program import Kind, Program
from gradsync_fx.options import Options
from gradsync_fx.planning.plan import Bucket
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.window import NONE
from gradsync_fx.user_lines import NOWHERE, TORCHS


ROLES = ("prologue", "forward", "backward", "gradient sync", "clipping", "optimizer", "other")
CLIPPING = f"{TORCHS}nn/utils/clip_grad.py"


def describe(
    captures: Sequence[CapturedStep],
    options: Options,
    *,
    step: str,
    line: str,
    simulated: bool = False,
    hardware: str | Hardware = "laptop",
) -> Report:
    """The report of the latest capture that reaches an update. Raises `WindowError` when there is none yet."""
    closing = [c for c in captures if c.updates]
    if not closing:
        raise WindowError(
            "report",
            seen="nothing has been captured yet that reaches an update",
            wanted="a call of the step before",
            fix="call the step, or step.prepare(...), first",
        )
    captured = closing[-1]
    everything = frozenset(range(len(options.steps)))
    programs = {"boundary": captured.programs.build(everything)}
    if options.accumulates:
        programs["accumulate"] = next(
            (c for c in captures if not c.updates), captured
        ).programs.build(NONE)
    prologue, computed_by = graph_of_prologue(captured)
    graph = (*prologue, *_graph(captured, programs, computed_by))
    collectives = _collectives(captured, programs)
    k = max(options.steps) or 1
    size, count = sum(c.bytes for c in collectives), len(collectives)
    times = k if options.sync_each_batch else 1
    return Report(
        step=step,
        line=line,
        k=options.steps[0] or "manual" if len(options.steps) == 1 else k,
        world_size=captured.facts.setting.world,
        simulated=simulated,
        collectives_before=k * count,
        collectives_after=times * count,
        bytes_before=k * size,
        bytes_after=times * size,
        collectives=collectives,
        levels=levels_of(captured.facts.setting, times * size),
        sharing=sharing_of(captured, programs["boundary"]),
        once=once_of(captured, k),
        kept=_kept(captured),
        refusals=_refusals(captured),
        moved=tuple(dict.fromkeys(m for c in captures for m in c.facts.capture.moved)),
        scale=scale(
            captured.programs.plan.accumulators,
            captured.facts.names,
            captured.facts.setting.wire_dtype,
            options,
            shares=captured.facts.shares,
        ),
        warnings=remarks(captures, options),
        unused_parameters=tuple(
            n
            for n in captured.facts.capture.parameters
            if all(n not in c.facts.names for c in captures)
        ),
        parameters=parameters(
            captured.facts.capture, captured.programs.plan.accumulators, captured.facts.names
        ),
        regions=_regions(graph),
        passes=tuple(e for c in captures for e in c.programs.journal.entries),
        programs=_programs(captures),
        graph=graph,
        predicted=predict(load_of(captured), k, hardware, sync_each=options.sync_each_batch),
        memory=memory_of(captured, programs),
        code=None,
    )


def region_of(captured: CapturedStep, node: Node, origin: Node | None) -> str:
    """The role of a program's node; origin: the node of the captured step that it was made from."""
    if origin is None:
        return "optimizer" if node.meta.get("made_by") == "inline_updates" else "gradient sync"
    if (
        origin.target is torch.ops.aten.copy_.default
        and origin in captured.facts.regions.boundary_writes
    ):
        return "optimizer"
    if origin.target is ops.UPDATE:
        return "optimizer"
    if origin in captured.facts.regions.beyond:
        if ops.is_collective(origin) or origin.target is ops.WAIT:
            return "gradient sync"
        return "clipping" if CLIPPING in (origin.meta.get("stack_trace") or "") else "other"
    return "backward" if origin.meta.get("autograd_backward") else "forward"


def _graph(
    captured: CapturedStep, programs: dict[str, Program], computed_by: dict[int, str]
) -> tuple[GraphNode, ...]:
    """The boundary program, node by node; inputs that hold optimizer state or scalars are left out.

    computed_by: for each value that is held for a window the node of the prologue that computes it.
    """
    boundary = programs["boundary"]
    originals = {n.name: n for n in captured.facts.capture.step.module.graph.nodes}
    shared = shared_nodes(boundary, programs["accumulate"]) if "accumulate" in programs else ()
    slots = dict(
        zip(boundary.module.graph.find_nodes(op="placeholder"), boundary.slots, strict=True)
    )
    quiet = (Kind.STATE, Kind.SCALAR, Kind.WEIGHT)
    shown = [
        n
        for n in boundary.module.graph.nodes
        if n.op != "output" and not (n in slots and slots[n].kind in quiet)
    ]
    names = {n.name for n in shown}
    modules = _modules(captured)
    found = []
    for node in shown:
        origin = originals.get(str(node.meta.get("origin", "")))
        slot = slots.get(node)
        value = node.meta.get("val")
        tensor = value if isinstance(value, torch.Tensor) else None
        found.append(
            GraphNode(
                name=node.name,
                op=f"{slot.kind.value}" if slot else str(node.target),
                region="input" if slot else region_of(captured, node, origin),
                module=modules.get(origin, "") if origin is not None else "",
                line=_line(origin) if origin is not None and not slot else "",
                inputs=(computed_by[slot.key],)
                if slot is not None and slot.kind is Kind.INVARIANT
                else tuple(s.name for s in node.all_input_nodes if s.name in names),
                shape=sizes(tensor.shape) if tensor is not None else (),
                dtype=dtype_name(tensor.dtype) if tensor is not None else "",
                bytes=size_in_bytes(tensor) if tensor is not None else 0,
                parameter=slot.name if slot else "",
                programs=("accumulate", "boundary") if node in shared else ("boundary",),
            )
        )
    return tuple(found)


def _line(node: Node) -> str:
    """`file:line` of the user's code, "" where torch recorded none."""
    line = ops.node_line(node)
    return "" if line == NOWHERE else line


def _modules(captured: CapturedStep) -> dict[Node, str]:
    """Path of the submodule that each node was traced in; for backward, of the forward value that it reads."""
    found: dict[Node, str] = {}
    for node in captured.facts.capture.step.module.graph.nodes:
        stack = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()]
        if stack:
            root, last = readable(stack[0]), readable(stack[-1])
            found[node] = last.removeprefix(root).removeprefix(".") or type_of(node)
        elif node.meta.get("autograd_backward"):
            sources = [s for s in node.all_input_nodes if s in found]
            forward = [s for s in sources if not s.meta.get("autograd_backward")]
            for source in (forward or sources)[-1:]:
                found[node] = found[source]
    return found


def type_of(node: Node) -> str:
    """Class name of the outermost module that a node was traced in."""
    _, kind = next(iter(node.meta["nn_module_stack"].values()))
    return str(getattr(kind, "__name__", kind))


def _regions(graph: Sequence[GraphNode]) -> tuple[Region, ...]:
    found = []
    for role in ROLES:
        nodes = [n for n in graph if n.region == role]
        if role == "prologue" and not nodes:
            continue
        lines = tuple(dict.fromkeys(n.line for n in nodes if n.line))
        found.append(Region(role, len(nodes), lines))
    return tuple(found)


def _collectives(captured: CapturedStep, programs: dict[str, Program]) -> tuple[Collective, ...]:
    found = []
    starts = {
        name: [
            (i, n)
            for i, n in enumerate(program.module.graph.nodes)
            if (ops.is_reduction(n) or n.meta.get("bucket"))
            and (n.meta.get("made_by") or "origin" not in n.meta)
        ]
        for name, program in programs.items()
    }
    buckets = [b for b in captured.facts.buckets if b.reduction.group is not None]
    for number, bucket in enumerate(buckets):
        positions = {n: s[number][0] for n, s in starts.items() if number < len(s)}
        nodes = {n: s[number][1].name for n, s in starts.items() if number < len(s)}
        found.append(_collective(captured, number, bucket, positions, nodes.get("boundary", "")))
    return tuple(found)


def _collective(
    captured: CapturedStep, number: int, bucket: Bucket, positions: dict[str, int], node: str
) -> Collective:
    leaves = [captured.facts.capture.step.leaves[i] for i in bucket.leaves]
    dtype = (
        captured.facts.setting.wire_dtype
        or captured.programs.plan.accumulators[leaves[0].name].dtype
    )
    gradients = [str(captured.facts.regions.gradients[i][0].args[0]) for i in bucket.leaves]
    return Collective(
        bucket=number,
        parameters=tuple(leaf.name for leaf in leaves),
        op=bucket.reduction.op,
        group=bucket.reduction.group or "",
        ranks=captured.facts.setting.world,
        dtype=dtype_name(dtype),
        bytes=sum(leaf.parameter.numel() for leaf in leaves) * dtype.itemsize,
        programs=positions,
        nodes=tuple([node, *gradients] if node else gradients),
        way=way_of(captured, bucket),
        way_back=way_back_of(captured, bucket),
    )


def _kept(captured: CapturedStep) -> tuple[Kept, ...]:
    """The user's own collectives: those of the micro-step run in every call, the others once, with the update."""
    found = []
    for node in captured.facts.capture.step.module.graph.nodes:
        if not ops.is_collective(node):
            continue
        if node not in captured.facts.regions.beyond:
            why = "no gradient goes into it: part of the loss or of a metric, in every micro-step"
        elif any(
            node in hand.wait.all_input_nodes for hand in captured.facts.regions.hand.values()
        ):
            continue
        else:
            why = "it reads reduced gradients: once, at the boundary"
        found.append(Kept(str(node.target), ops.node_line(node), why, node.name))
    return tuple(found)


def _refusals(captured: CapturedStep) -> tuple[str, ...]:
    leaves = captured.facts.capture.step.leaves
    return tuple(
        f"{leaves[leaf].name}: its gradient goes into a tensor that the step reduces itself; not bucketed"
        for leaf in sorted(captured.facts.regions.hand_flat)
    )


def _programs(captures: Sequence[CapturedStep]) -> tuple[ProgramInfo, ...]:
    found = []
    for captured in captures:
        for name, program in captured.programs.by_name.items():
            calls, seconds = captured.runner.measured.get(name, (0, 0.0))
            nodes = list(program.module.graph.nodes)
            found.append(
                ProgramInfo(
                    name=name,
                    nodes=len(nodes),
                    collectives=sum(1 for n in nodes if ops.is_collective(n)),
                    compile_seconds=captured.programs.compile_seconds.get(name),
                    calls=calls,
                    seconds=seconds,
                    code=program.module.code,
                )
            )
    return tuple(found)
