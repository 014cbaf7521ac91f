"""Which nodes of a step are its micro-step and which its update, by data flow and by what is written.

gradient marker   the running gradient of a leaf; the window's sum is spliced in here. A marker that only feeds the
                  next marker of its leaf (a second backward) is a partial sum, not a cut.
beyond            nodes that depend on a gradient: clipping, norms, hand-written reductions, the update
writes            to a parameter: boundary. To a buffer or to another tensor: every call, unless the value depends
                  on a gradient or on the update; then boundary. (A buffer fed by data through updated parameters, as
                  batch statistics in a GAN step, is written on every call, computed from the parameters as they are.)
outputs           likewise: what depends on a gradient, or on the update alone, is the boundary's
tail              an update without a micro-step reads the user's own tensors (tail_data: an average of the weights, its
                  decay), and gives those outputs of the boundary that read none (tail_outputs: a clipped norm)
stages            how many updates of the same call a leaf's gradient lies behind (a generator's, behind that of its
                  discriminator): leaves of two stages cannot share an all-reduce
                  late_outputs are of data and of updated parameters: a loss after the update
sources           what a write or an output of the boundary depends on first: gradients and updates

Nothing here reads a node's name or metadata; those serve messages only.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import networkx as nx
import torch
from torch.fx import Graph, Node

from gradsync_fx import ops
from gradsync_fx.errors import CaptureError, ReadBeforeBoundaryError
from gradsync_fx.ops import argument
from gradsync_fx.program import Kind, Slot, Step, output_values, writes


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
    boundary_writes: dict[Node, frozenset[Node]]
    boundary_outputs: dict[int, frozenset[Node]]
    update_sources: dict[Node, frozenset[Node]]
    stages: dict[int, int]
    tail_data: tuple[int, ...]
    tail_outputs: tuple[int, ...]
    late_outputs: tuple[int, ...]
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
    kinds = dict(zip(graph.find_nodes(op="placeholder"), step.slots, strict=True))
    kept = {argument(write, 0) for write in effects}
    plain.remove_nodes_from(cuts)
    from_data = _downstream(
        plain, [h for h, slot in kinds.items() if slot.kind is Kind.DATA and h not in kept]
    )
    stops = frozenset(cuts) | frozenset(updates)

    boundary: dict[Node, frozenset[Node]] = {}
    for write in effects:
        kind, value = kinds[argument(write, 0)].kind, argument(write, 1)
        each_call = kind is Kind.BUFFER and value in from_data
        depends = value in reads_gradient or (value in after_update and not each_call)
        if kind is Kind.PARAMETER or depends:
            boundary[write] = _nearest(value, stops)
    results = output_values(step.module)
    outputs = {
        i: _nearest(n, stops)
        for i, n in enumerate(results)
        if n in reads_gradient or (n in after_update and n not in from_data)
        if n.target is not ops.NOTE
    }
    sources = {
        u: frozenset[Node]().union(*(_nearest(g, stops) for g in argument(u, 3))) for u in updates
    }
    hand, hand_flat = _hand_written(gradients, flow)
    return Regions(
        gradients=gradients,
        partial=partial,
        updates=updates,
        beyond=frozenset(beyond | after_update),
        boundary_writes=boundary,
        boundary_outputs=outputs,
        update_sources=sources,
        stages=_stages(gradients, sources, order, stops),
        tail_data=_data_read([*boundary, *updates], frozenset(cuts), kinds),
        late_outputs=tuple(
            i for i, n in enumerate(results) if n in after_update and i not in outputs
        ),
        tail_outputs=tuple(
            i
            for i in outputs
            if results[i] not in boundary and not _data_read([results[i]], frozenset(cuts), kinds)
        ),
        hand=hand,
        hand_flat=hand_flat,
    )


def _nearest(value: object, stops: frozenset[Node]) -> frozenset[Node]:
    """The nodes of `stops` that a value depends on, seen from the value; what lies behind them does not count."""
    found, seen, stack = set(), set(), [value] if isinstance(value, Node) else []
    while stack:
        node = stack.pop()
        if node in stops:
            found.add(node)
        elif node not in seen:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return frozenset(found)


def _stages(
    gradients: dict[int, tuple[Node, ...]],
    sources: dict[Node, frozenset[Node]],
    order: dict[Node, int],
    stops: frozenset[Node],
) -> dict[int, int]:
    stage: dict[Node, int] = {}
    for node in sorted(stops, key=order.__getitem__):
        if node in sources:
            stage[node] = max((stage[s] for s in sources[node]), default=0)
        else:
            behind = [s for s in _nearest(argument(node, 0), stops) if s in sources]
            stage[node] = max((stage[s] + 1 for s in behind), default=0)
    return {leaf: stage[markers[0]] for leaf, markers in gradients.items()}


def _data_read(
    values: list[Node], cuts: frozenset[Node], kinds: dict[Node, Slot]
) -> tuple[int, ...]:
    """Positions of the user's own tensors that values depend on other than through gradients."""
    stack, seen = list(values), set[Node]()
    while stack:
        node = stack.pop()
        if node not in seen and node not in cuts:
            seen.add(node)
            stack.extend(node.all_input_nodes)
    return tuple(s.key for holder, s in kinds.items() if holder in seen and s.kind is Kind.DATA)


def check_weights(step: Step, regions: Regions) -> None:
    """Raises `CaptureError` where a weight is no single number, or is not known before the gradients are used.

    That is where the weight, a loss or a gradient depends on an update of the same call: whether the micro-step counts
    would be known only after an update that had to know it.
    """
    stops = {m for markers in regions.gradients.values() for m in markers} | set(regions.updates)
    notes = step.module.graph.find_nodes(op="call_function", target=ops.NOTE)
    weights = [argument(n, 1) for n in notes if argument(n, 2) == ops.Role.WEIGHT]
    for weight in weights:
        if weight.meta["val"].numel() != 1:
            raise CaptureError(
                f"micro_batch_weight, at {ops.user_line(weight)}",
                seen=f"a weight of shape {tuple(weight.meta['val'].shape)}",
                wanted="a number, or a tensor of one element",
                fix="sum it up: micro_batch_weight(mask.sum())",
            )
    losses = [argument(n, 1) for n in notes if argument(n, 2) == ops.Role.LOSS]
    cuts = [argument(m, 0) for markers in regions.gradients.values() for m in markers]
    for value in [*weights, *losses, *cuts]:
        if _nearest(value, frozenset(stops)):
            raise CaptureError(
                f"weights of micro-steps, at {ops.user_line(value)}",
                seen="a weight, a loss or a gradient that depends on an update or a reduced gradient of the same call",
                wanted="one update, after all losses of the step",
                fix='make a step of each part, or leave out skip_nonfinite and reduction="weighted"',
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
