"""Which nodes of a step are its micro-step and which its update, by data flow and by what is written.

forward, backward -> gradient markers (the cut) -> clipping, norms, update -> writes, outputs
`---- runs on every call ----------------'       `---- runs in the call that closes the window, or in a tail ----'

A write happens on every call, unless its value depends on a gradient or on the update; then it is the boundary's. Three
kinds of write need more than that:

- a buffer that is fed by data through updated parameters (batch statistics in a GAN's step) is written on every call,
  computed from the parameters as they are
- what a parameter becomes of itself alone (a decay, a projection) is the boundary's
- a parameter that forward writes from data, and that is updated after that, has both: on every call it gets what the
  update would be given

Outputs go the same way. A tail is an update without a micro-step: it has no data of the user's, other than tensors that
updates read. Collectives that reduce no gradient are effects, which every rank has, whoever uses their results.

Nothing here reads a node's name or metadata; those serve messages only.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from gradsync_fx.errors import CaptureError, ReadBeforeBoundaryError
from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import Nearest, downstream, upstream
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot, Step, output_values, writes


@dataclass(frozen=True, slots=True)
class HandSync:
    """A gradient reduction that the user wrote."""

    wait: Node  # its value is the reduced gradient of the leaf
    op: str  # as torch's functional collectives name it: "sum", "avg"
    group: str  # by the name of the process group


@dataclass(frozen=True, slots=True)
class Regions:
    """The parts of one step; nodes are the step's own. Found once, when it is captured; never changed.

    "Sources" of a node: the gradient markers and updates that it depends on first. It waits for all their parts.
    """

    # By leaf, in the order in which gradients become ready: its markers, at which the window's sum is spliced in. More
    # than one where the step zeroes the gradient and computes it again.
    gradients: dict[int, tuple[Node, ...]]
    # Markers that only feed the next marker of their leaf (a second backward): partial sums, no cut.
    partial: frozenset[Node]
    # The update markers, in the step's order.
    updates: tuple[Node, ...]
    # All that depends on a gradient or an update, these included: clipping, norms, hand-written reductions.
    beyond: frozenset[Node]
    # Writes that wait for the boundary, each with its sources; all others happen on every call.
    boundary_writes: dict[Node, frozenset[Node]]
    # Those of them that on every call write what the update would be given.
    early_writes: frozenset[Node]
    # Outputs of the boundary alone, by position, each with its sources.
    boundary_outputs: dict[int, frozenset[Node]]
    # By update: the sources of its gradients.
    update_sources: dict[Node, frozenset[Node]]
    # By leaf: how many updates or reduced gradients of the same call its gradient depends on, one through another (a
    # generator's on the update of its discriminator). Leaves of two stages cannot share an all-reduce.
    stages: dict[int, int]
    # Positions of the user's own tensors that a tail reads (an average of the weights, its decay).
    tail_data: tuple[int, ...]
    # Outputs of the boundary that a tail gives, too: they read no data (a clipped norm).
    tail_outputs: tuple[int, ...]
    # Outputs of data and of updated parameters (a loss after the update), by position.
    late_outputs: tuple[int, ...]
    # By argument of the host's calls (a scheduler's metric): the sources of those that wait like outputs.
    boundary_host: dict[int, frozenset[Node]]
    # By leaf: the user's own all-reduce of this gradient alone.
    hand: dict[int, HandSync]
    # Leaves whose gradient the user reduces together with others, in one tensor.
    hand_flat: frozenset[int]
    # Collectives that reduce no gradient, each with its sources; empty for those of every call.
    collectives: dict[Node, frozenset[Node]]
    # Those of them that a tail runs, too: they wait, and read no data of the micro-step.
    tail_collectives: frozenset[Node]

    @property
    def leaves(self) -> tuple[int, ...]:
        """Leaves with a gradient, in the order in which their gradients become ready."""
        return tuple(self.gradients)


def find_regions(step: Step) -> Regions:
    """Region analysis of a captured step; pure. See the module's text for the rules."""
    graph = step.module.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    effects = writes(step.module)
    results = output_values(step.module)
    remaining = _no_gradient_reductions(step, effects)
    needed = upstream([*effects, *(n for n in results if isinstance(n, Node)), *remaining])

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

    stops = dict.fromkeys([*cuts, *updates])
    nearest = Nearest(graph, stops)
    after_update = downstream(updates)
    # What would depend on a gradient if every update left its parameters as they are.
    reads_gradient = downstream(cuts, without=set(updates))
    kinds = dict(zip(graph.find_nodes(op="placeholder"), step.slots, strict=True))
    # A tensor that the step keeps (an average, a count) is no data; an input that it changes is.
    kept = {argument(write, 0) for write in effects} - upstream(cuts)
    from_data = downstream(
        [
            h
            for h, slot in kinds.items()
            # A number (a count, a size) makes no data of what it scales.
            if slot.kind is Kind.DATA and h not in kept and isinstance(h.meta["val"], torch.Tensor)
        ],
        without=stops,
    )

    boundary: dict[Node, frozenset[Node]] = {}
    early: set[Node] = set()
    for write in effects:
        kind, value = kinds[argument(write, 0)].kind, argument(write, 1)
        each_call = kind is Kind.BUFFER and value in from_data
        depends = value in reads_gradient or (value in after_update and not each_call)
        # A decay, a projection: what a parameter becomes of itself alone belongs to its update.
        alone = kind is Kind.PARAMETER and value not in from_data
        if depends or alone:
            boundary[write] = nearest.of(value)
            given = _given_to_update(value)
            if given in from_data and given not in reads_gradient:
                early.add(write)
    # So does a count that is made of no data and feeds such writes alone: it weighs an average.
    waiting = dict(boundary)
    forward = upstream(cuts)
    for write in effects:
        holder, value = argument(write, 0), argument(write, 1)
        if write not in boundary and not {holder, value} & forward and value not in from_data:
            fed = downstream([holder, value])
            readers = [sources for w, sources in waiting.items() if argument(w, 1) in fed]
            if readers:
                boundary[write] = frozenset[Node]().union(*readers)

    def waits(value: Node) -> bool:
        return value in reads_gradient or (value in after_update and value not in from_data)

    outputs = {
        i: nearest.of(n) for i, n in enumerate(results) if waits(n) and n.target is not ops.NOTE
    }
    host = {
        int(argument(n, 3)): argument(n, 1)
        for n in graph.find_nodes(op="call_function", target=ops.NOTE)
        if argument(n, 2) == ops.Role.HOST and waits(argument(n, 1))
    }
    sources = {
        u: frozenset[Node]().union(*(nearest.of(g) for g in argument(u, 3))) for u in updates
    }
    hand, hand_flat = _hand_written(gradients)
    collectives = {c: nearest.of(c) if waits(c) else frozenset[Node]() for c in remaining}
    return Regions(
        gradients=gradients,
        partial=partial,
        updates=updates,
        beyond=frozenset(downstream(stops)),
        boundary_writes=boundary,
        early_writes=frozenset(early),
        boundary_outputs=outputs,
        update_sources=sources,
        stages=_stages(gradients, sources, order, nearest),
        tail_data=_data_read([*boundary, *updates, *host.values()], frozenset(cuts), kinds),
        late_outputs=tuple(
            i for i, n in enumerate(results) if n in after_update and i not in outputs
        ),
        tail_outputs=tuple(
            i
            for i in outputs
            if results[i] not in boundary and not _data_read([results[i]], frozenset(cuts), kinds)
        ),
        boundary_host={i: nearest.of(n) for i, n in sorted(host.items())},
        hand=hand,
        hand_flat=hand_flat,
        collectives=collectives,
        tail_collectives=frozenset(
            c
            for c, waited in collectives.items()
            if waited and not _data_read([c], frozenset(cuts), kinds)
        ),
    )


def _no_gradient_reductions(step: Step, effects: list[Node]) -> list[Node]:
    """The step's own collectives in their order, without those that hand reduced gradients to an update."""
    graph = step.module.graph
    markers = graph.find_nodes(op="call_function", target=ops.LEAF_GRAD)
    images = downstream(markers, through=ops.is_linear)  # gradients, and what is linear in them
    kinds = dict(zip(graph.find_nodes(op="placeholder"), step.slots, strict=True))
    to_updates = upstream(
        [
            *graph.find_nodes(op="call_function", target=ops.UPDATE),
            *(w for w in effects if kinds[argument(w, 0)].kind is Kind.PARAMETER),
        ]
    )

    def reduces_gradients(node: Node) -> bool:
        if not ops.is_reduction(node) or images.isdisjoint(node.all_input_nodes):
            return False
        alone = any(n.target is ops.LEAF_GRAD and len(n.users) == 1 for n in node.all_input_nodes)
        return alone or node in to_updates

    return [n for n in graph.nodes if ops.is_collective(n) and not reduces_gradients(n)]


def _given_to_update(value: Node) -> Node:
    """The parameter that an update was given for this result of it; any other value is its own."""
    while value.target is operator.getitem and argument(value, 0).target is ops.UPDATE:
        value = argument(argument(value, 0), 2)[argument(value, 1)]
        while value.target is torch.ops.aten.clone.default:
            value = argument(value, 0)
    return value


def _stages(
    gradients: dict[int, tuple[Node, ...]],
    sources: dict[Node, frozenset[Node]],
    order: dict[Node, int],
    nearest: Nearest,
) -> dict[int, int]:
    stage: dict[Node, int] = {}
    stops = [*sources, *(m for markers in gradients.values() for m in markers)]
    for node in sorted(stops, key=order.__getitem__):
        if node in sources:
            stage[node] = max((stage[s] for s in sources[node]), default=0)
        else:
            behind = nearest.of(argument(node, 0))
            stage[node] = max((stage[s] + 1 for s in behind), default=0)
    return {leaf: stage[markers[0]] for leaf, markers in gradients.items()}


def _data_read(
    values: list[Node], cuts: frozenset[Node], kinds: dict[Node, Slot]
) -> tuple[int, ...]:
    """Positions of the user's own tensors that values depend on other than through gradients."""
    seen = upstream(values, without=cuts)
    return tuple(s.key for holder, s in kinds.items() if holder in seen and s.kind is Kind.DATA)


def check_weights(step: Step, regions: Regions) -> None:
    """Raises `CaptureError` where a weight is no single number, or is not known before the gradients are used.

    That is where the weight, a loss or a gradient depends on an update of the same call: whether the micro-step counts
    would be known only after an update that had to know it.
    """
    cuts = [m for markers in regions.gradients.values() for m in markers]
    nearest = Nearest(step.module.graph, [*cuts, *regions.updates])
    notes = step.module.graph.find_nodes(op="call_function", target=ops.NOTE)
    weights = [argument(n, 1) for n in notes if argument(n, 2) == ops.Role.WEIGHT]
    for weight in weights:
        if weight.meta["val"].numel() != 1:
            raise CaptureError(
                f"micro_batch_weight, at {ops.node_line(weight)}",
                seen=f"a weight of shape {tuple(weight.meta['val'].shape)}",
                wanted="a number, or a tensor of one element",
                fix="sum it up: micro_batch_weight(mask.sum())",
            )
    losses = [argument(n, 1) for n in notes if argument(n, 2) == ops.Role.LOSS]
    for value in [*weights, *losses, *(argument(m, 0) for m in cuts)]:
        if nearest.of(value):
            raise CaptureError(
                f"weights of micro-steps, at {ops.node_line(value)}",
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
    gradients: dict[int, tuple[Node, ...]],
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
        images = downstream([marker], through=ops.is_linear)
        if any(ops.is_reduction(user) for node in images for user in node.users):
            joined.add(leaf)
    return alone, frozenset(joined)


def check_deferrable(step: Step, regions: Regions) -> None:
    """Raises `ReadBeforeBoundaryError` where a window of more than one micro-step would change what the step means.

    That is where a gradient, or another write of the micro-step, depends on a reduced gradient other than through an
    optimizer's update.
    """
    cuts = [m for markers in regions.gradients.values() for m in markers]
    # A cut behind an update is none: its value is that of the next window's parameters.
    nearest = Nearest(step.module.graph, [*cuts, *regions.updates])
    for markers in regions.gradients.values():
        for marker in markers:
            found = nearest.behind(marker)
            for cut in cuts if found else ():
                if cut in found:
                    _refuse(step, cut, upstream([marker], without=regions.updates))
        if len(markers) > 1:
            _refuse(step, markers[0], set(markers[0].users))


def _refuse(step: Step, cut: Node, inside: set[Node]) -> None:
    reader = next((u for u in cut.users if u in inside), next(iter(cut.users)))
    name = step.leaves[int(argument(cut, 1))].name
    raise ReadBeforeBoundaryError(
        f"synced gradient of {name!r}",
        seen=f"it is read at {ops.node_line(reader)} by {reader.name} ({reader.target}) before the boundary",
        wanted="gradients that are read only by the update when gradient_accumulation_steps > 1",
        fix="use gradient_accumulation_steps=1 for this step, or read the gradient after the last backward",
    )
