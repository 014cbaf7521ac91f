"""What a window computes once, for the report: what is held, what it is made of, and the prologue as a graph."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from gradsync_fx.inspection.data import GraphNode, HeldValue, OncePerWindow
from gradsync_fx.inspection.tensors import dtype_name, size_in_bytes, sizes
from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.flops import bytes_of_value
from gradsync_fx.ir.ops import argument, node_line
from gradsync_fx.ir.program import writes
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.user_lines import NOWHERE


_ORDER = ("value", "sum", "copy")
_COPY = torch.ops.aten.copy_.default


def once_of(captured: CapturedStep, k: int) -> OncePerWindow:
    """Of windows of k calls."""
    kept = captured.programs.kept
    held = sorted(_held(captured), key=lambda h: (_ORDER.index(h.what), -h.bytes))
    return OncePerWindow(
        found=len(kept.found),
        held=tuple(held),
        saved=k * kept.saved,
        calls=k * kept.call,
    )


def _held(captured: CapturedStep) -> Iterator[HeldValue]:
    step, kept = captured.facts.capture.step, captured.programs.kept
    slots = dict(zip(step.module.graph.find_nodes(op="placeholder"), step.slots, strict=True))
    for node in kept.held:
        made_of = upstream([node])
        of = tuple(slot.name for holder, slot in slots.items() if holder in made_of)
        what = "value" if node in kept.read else "copy"
        yield HeldValue(what, _op(node), of, _line(node), bytes_of_value(node))
    for group in kept.deferred:
        of = tuple(step.leaves[leaf].name for leaf in group.others)
        for source in group.sources:
            yield HeldValue("sum", _op(source), of, _line(source), bytes_of_value(source))


def graph_of_prologue(captured: CapturedStep) -> tuple[tuple[GraphNode, ...], dict[int, str]]:
    """The prologue, node by node, and by the number of each held value the name of the node that computes it."""
    program = captured.programs.build_held().get("prologue")
    if program is None:
        return (), {}
    graph = program.module.graph
    slots = dict(zip(graph.find_nodes(op="placeholder"), program.slots, strict=True))
    originals = {n.name: n for n in captured.facts.capture.step.module.graph.nodes}
    stored = {w.args[0]: argument(w, 1) for w in writes(program.module)}
    shown = [
        n for n in graph.nodes if n.op != "output" and n not in stored and n.target is not _COPY
    ]
    names = {n: f"prologue {n.name}" for n in shown}
    found = []
    for node in shown:
        slot, value = slots.get(node), node.meta.get("val")
        origin = originals.get(str(node.meta.get("origin", "")))
        tensor = value if isinstance(value, torch.Tensor) else None
        found.append(
            GraphNode(
                name=names[node],
                op=slot.kind.value if slot else str(node.target),
                region="prologue",
                module="",
                line=_line(origin) if origin is not None and not slot else "",
                inputs=tuple(names[s] for s in node.all_input_nodes if s in names),
                shape=sizes(tensor.shape) if tensor is not None else (),
                dtype=dtype_name(tensor.dtype) if tensor is not None else "",
                bytes=size_in_bytes(tensor) if tensor is not None else 0,
                parameter=slot.name if slot else "",
                programs=("prologue",),
            )
        )
    return tuple(found), {slots[holder].key: names[value] for holder, value in stored.items()}


def _op(node: Node) -> str:
    if node.op == "placeholder":
        return "parameter"
    packet = getattr(node.target, "overloadpacket", None)
    if packet is None:  # an item of what gives several
        return _op(node.all_input_nodes[0])
    return str(packet.__name__)


def _line(node: Node) -> str:
    line = node_line(node)
    return "" if line == NOWHERE else line
