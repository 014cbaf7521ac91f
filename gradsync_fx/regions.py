"""Which nodes of a step are its micro-step and which its update, by data flow and by what is written.

gradient marker   the running gradient of a leaf; the window's sum is spliced in here. A marker that only feeds the
                  next marker of its leaf (a second backward) is a partial sum, not a cut.
beyond            nodes that depend on a gradient: clipping, norms, hand-written reductions, the update
writes            to a parameter: boundary. To a buffer or to another tensor: every call, unless the value depends
                  on a gradient or on the update; then boundary. (A buffer fed by data through updated parameters, as
                  batch statistics in a GAN step, is written on every call, computed from the parameters as they are.)

Nothing here reads a node's name or metadata; those serve messages only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import torch
from torch.fx import Graph, Node

from gradsync_fx import ops
from gradsync_fx.errors import ReadBeforeBoundaryError
from gradsync_fx.ops import argument
from gradsync_fx.program import Kind, Step, output_values, writes


@dataclass(frozen=True, slots=True)
class HandSync:
    """A gradient reduction that the user wrote: this wait's value is the reduced gradient of the leaf."""

    wait: Node
    op: str
    group: str


@dataclass(frozen=True, slots=True)
class Regions:
    """The parts of one step; nodes are the step's own."""

    gradients: dict[int, tuple[Node, ...]]
    partial: frozenset[Node]
    updates: tuple[Node, ...]
    beyond: frozenset[Node]
    boundary_writes: frozenset[Node]
    boundary_outputs: tuple[int, ...]
    hand: dict[int, HandSync]
    hand_flat: frozenset[int]

    @property
    def leaves(self) -> tuple[int, ...]:
        """Leaves with a gradient, in the order in which their gradients become ready."""
        return tuple(self.gradients)


def data_flow(graph: Graph) -> nx.DiGraph:
    """One networkx node for each FX node; an edge from a value to each reader."""
    flow: nx.DiGraph = nx.DiGraph()
    flow.add_nodes_from(graph.nodes)
    flow.add_edges_from((source, node) for node in graph.nodes for source in node.all_input_nodes)
    return flow


def _downstream(flow: nx.DiGraph, sources: Iterable[Node]) -> set[Node]:
    reached: set[Node] = set()
    for source in sources:
        if source not in reached:
            reached.add(source)
            reached |= nx.descendants(flow, source)
    return reached


def find_regions(step: Step) -> Regions:
    """Region analysis of a captured step; pure. See the module's text for the rules."""
    graph = step.module.graph
    flow = data_flow(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    effects = writes(step.module)
    live = set(effects) | {n for n in output_values(step.module) if isinstance(n, Node)}
    needed = set(live)
    for node in live:
        needed |= nx.ancestors(flow, node)

    markers = [n for n in graph.find_nodes(op="call_function", target=ops.LEAF_GRAD) if n in needed]
    partial = frozenset(m for m in markers if _feeds_only_next_marker(m, needed))
    cuts = [m for m in markers if m not in partial]
    updates = tuple(
        n for n in graph.find_nodes(op="call_function", target=ops.UPDATE) if n in needed
    )
    gradients: dict[int, tuple[Node, ...]] = {}
    for marker in sorted(cuts, key=lambda m: order[argument(m, 0)]):
        leaf = int(argument(marker, 1))
        gradients[leaf] = (*gradients.get(leaf, ()), marker)

    beyond = _downstream(flow, cuts)
    after_update = _downstream(flow, updates)
    # What would depend on a gradient if every update left its parameters as they are.
    plain = flow.copy()
    plain.remove_nodes_from(updates)
    reads_gradient = _downstream(plain, cuts)
    data = [
        holder
        for holder, slot in zip(graph.find_nodes(op="placeholder"), step.slots, strict=True)
        if slot.kind is Kind.DATA
    ]
    from_data = _downstream(flow, data)

    kinds = dict(zip(graph.find_nodes(op="placeholder"), step.slots, strict=True))
    boundary: set[Node] = set()
    for write in effects:
        target = kinds[argument(write, 0)]
        value = write.args[1]
        each_call = target.kind is Kind.BUFFER and value in from_data
        depends = value in reads_gradient or (value in after_update and not each_call)
        if target.kind is Kind.PARAMETER or depends:
            boundary.add(write)
    outputs = tuple(
        i for i, n in enumerate(output_values(step.module)) if n in beyond or n in after_update
    )
    hand, hand_flat = _hand_written(gradients, flow)
    return Regions(
        gradients=gradients,
        partial=partial,
        updates=updates,
        beyond=frozenset(beyond | after_update),
        boundary_writes=frozenset(boundary),
        boundary_outputs=outputs,
        hand=hand,
        hand_flat=hand_flat,
    )


def _feeds_only_next_marker(marker: Node, needed: set[Node]) -> bool:
    users = [u for u in marker.users if u in needed]
    return bool(users) and all(
        u.target is torch.ops.aten.add.Tensor
        and all(
            v.target is ops.LEAF_GRAD and v.args[1] == marker.args[1]
            for v in u.users
            if v in needed
        )
        for u in users
    )


def _hand_written(
    gradients: dict[int, tuple[Node, ...]], flow: nx.DiGraph
) -> tuple[dict[int, HandSync], frozenset[int]]:
    """Leaves whose gradient the user reduces: alone (`hand`), or joined with others in one tensor (`hand_flat`)."""
    alone: dict[int, HandSync] = {}
    joined: set[int] = set()
    for leaf, (marker, *rest) in gradients.items():
        if rest:
            continue
        users = list(marker.users)
        if len(users) == 1 and users[0].target is ops.ALL_REDUCE:
            (wait,) = users[0].users
            alone[leaf] = HandSync(wait, str(users[0].args[1]), str(users[0].args[2]))
            continue
        seen, frontier = {marker}, [marker]
        while frontier:
            for user in frontier.pop().users:
                if user in seen:
                    continue
                seen.add(user)
                if ops.is_reduction(user):
                    joined.add(leaf)
                elif ops.is_linear(user):
                    frontier.append(user)
    return alone, frozenset(joined)


def check_deferrable(step: Step, regions: Regions) -> None:
    """Raises `ReadBeforeBoundaryError` where a window of more than one micro-step would change what the step means.

    That is where a gradient, or another write of the micro-step, depends on a reduced gradient other than through an
    optimizer's update.
    """
    flow = data_flow(step.module.graph)
    flow.remove_nodes_from(regions.updates)
    cuts = [m for markers in regions.gradients.values() for m in markers]
    for markers in regions.gradients.values():
        for marker in markers:
            inside = nx.ancestors(flow, marker)
            for cut in cuts:
                if cut in inside:
                    _refuse(step, cut, inside | {marker})
        if len(markers) > 1:
            _refuse(step, markers[0], set(markers[0].users))


def _refuse(step: Step, cut: Node, inside: set[Node]) -> None:
    reader = next((u for u in cut.users if u in inside), next(iter(cut.users)))
    name = step.leaves[int(argument(cut, 1))].name
    raise ReadBeforeBoundaryError(
        f"synced gradient of {name!r}",
        seen=f"it is read at {ops.user_line(reader)} by {reader.name} ({reader.target}) before the boundary",
        wanted="gradients that are read only by the update when gradient_accumulation_steps > 1",
        fix="use gradient_accumulation_steps=1 for this step, or read the gradient after the last backward",
    )
