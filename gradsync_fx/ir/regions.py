"""Splits the nodes of a step into its micro-step and its update, by dataflow and by what is written.

gradient marker   the running gradient of a leaf: the window's sum is spliced in here
partial sum       a marker that only feeds the next marker of its leaf (a second backward)
cut               any other marker; what depends on a cut or on an update waits for the boundary
source            of a value that waits: the cuts and updates that reach it with no other in between

What becomes of each effect of the step:

write             on every call, unless its value waits. A buffer that depends on data through updated parameters (batch
                  statistics in a GAN's step) is written on every call, from the parameters as they are. What a
                  parameter becomes of itself alone (a decay, a projection) is written at the boundary. A parameter that
                  forward writes from data and an update writes again is written twice: on every call with what the
                  update would be given, at the boundary with the update.
output            given on every call, unless its value waits
collective        run on every call, unless its value waits, whether or not its result has uses; those that reduce
                  gradients for an update are replaced by the window's own reduction
tail              an update without a micro-step: it does what waits and reads no data of a micro-step. It may read the
                  tensors that the step was last given (an average of the weights, its decay).

Nothing here reads a node's name or metadata; those serve messages only.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch.fx import Node

from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import Nearest, downstream, upstream
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot, Step, output_values, writes


Sources = frozenset[Node]


@dataclass(frozen=True, slots=True)
class HandSync:
    """A gradient reduction that the user wrote.

    wait: its value is the reduced gradient of the leaf. op: "sum" or "avg". group: the name of its process group.
    """

    wait: Node
    op: str
    group: str


@dataclass(frozen=True, slots=True)
class Regions:
    """The parts of one step; nodes are the step's own. Found once for each capture, and never changed.

    gradients: leaf number to its cuts (several where the gradient is read between two backwards), leaves in the order
        in which their gradients become ready.
    partial: markers that are no cuts.
    updates: the step's `optimizer.step()` markers, in order.
    beyond: all nodes that depend on a cut or an update: clipping, norms, reductions by hand, the update.
    boundary_writes: each write that waits, with its sources.
    early_writes: those of them whose parameter is written on every call, too, as the update would be given it.
    boundary_outputs: position of each output that waits, with its sources.
    update_sources: each update, with the sources of its gradients.
    stages: leaf number to the most cuts of the same call on one path to its gradient (a generator's depends on the
        update of its discriminator, and so on that one's cuts): leaves of two stages cannot share a bucket.
    tail_data: positions of the step's own inputs that a tail reads.
    tail_outputs: positions of the outputs that a tail gives (a clipped norm).
    late_outputs: positions of outputs made of data and of updated parameters, given on every call (a loss after the
        update).
    boundary_host: argument of the host's calls (a scheduler's metric) by number, where it waits, with its sources.
    hand: leaf number to the user's own reduction of this gradient alone.
    hand_flat: leaves whose gradients the user concatenates, or scales, before reducing them.
    collectives: those that reduce no gradient for an update, in order, each with its sources; none: on every call.
    tail_collectives: those that wait and read no data: a tail runs them.
    """

    gradients: dict[int, tuple[Node, ...]]
    partial: frozenset[Node]
    updates: tuple[Node, ...]
    beyond: frozenset[Node]
    boundary_writes: dict[Node, Sources]
    early_writes: frozenset[Node]
    boundary_outputs: dict[int, Sources]
    update_sources: dict[Node, Sources]
    stages: dict[int, int]
    tail_data: tuple[int, ...]
    tail_outputs: tuple[int, ...]
    late_outputs: tuple[int, ...]
    boundary_host: dict[int, Sources]
    hand: dict[int, HandSync]
    hand_flat: frozenset[int]
    collectives: dict[Node, Sources]
    tail_collectives: frozenset[Node]

    @property
    def leaves(self) -> tuple[int, ...]:
        """Leaves with a gradient, in the order in which their gradients become ready."""
        return tuple(self.gradients)


def find_regions(step: Step) -> Regions:
    """Region analysis of a captured step; pure. The module's docstring has the rules."""
    graph = step.module.graph
    effects = writes(step.module)
    results = output_values(step.module)
    own = _no_gradient_reductions(step, effects)
    needed = upstream([*effects, *(n for n in results if isinstance(n, Node)), *own])
    markers = [n for n in graph.find_nodes(op="call_function", target=ops.LEAF_GRAD) if n in needed]
    partial = frozenset(m for m in markers if _feeds_only_next_marker(m, needed))
    cuts = [m for m in markers if m not in partial]
    updates = [n for n in graph.find_nodes(op="call_function", target=ops.UPDATE) if n in needed]

    flow = _Flow(step, effects, cuts, updates)
    gradients = _by_leaf(cuts, flow)
    boundary = _boundary_writes(effects, flow)
    outputs = {
        i: flow.nearest.of(n)
        for i, n in enumerate(results)
        if flow.waits(n) and n.target is not ops.NOTE
    }
    host = {
        int(argument(n, 3)): argument(n, 1)
        for n in graph.find_nodes(op="call_function", target=ops.NOTE)
        if argument(n, 2) == ops.Role.HOST
        and (int(argument(n, 3)) in step.assigned or flow.waits(argument(n, 1)))
    }
    sources = {u: Sources().union(*map(flow.nearest.of, argument(u, 3))) for u in updates}
    hand, hand_flat = _hand_written(gradients)
    collectives = {c: flow.nearest.of(c) if flow.waits(c) else Sources() for c in own}
    return Regions(
        gradients=gradients,
        partial=partial,
        updates=tuple(updates),
        beyond=frozenset(downstream([*cuts, *updates])),
        boundary_writes=boundary,
        early_writes=frozenset(w for w in boundary if flow.is_early(w)),
        boundary_outputs=outputs,
        update_sources=sources,
        stages=_stages(gradients, sources, flow),
        tail_data=flow.data_read([*boundary, *updates, *host.values()]),
        tail_outputs=tuple(
            i for i in outputs if results[i] not in boundary and not flow.data_read([results[i]])
        ),
        late_outputs=tuple(
            i for i, n in enumerate(results) if n in flow.after_update and i not in outputs
        ),
        boundary_host={
            # A count has no sources: it goes with the updates.
            i: flow.nearest.of(n) or (Sources(updates) if i in step.assigned else Sources())
            for i, n in sorted(host.items())
        },
        hand=hand,
        hand_flat=hand_flat,
        collectives=collectives,
        tail_collectives=frozenset(
            c for c, waited in collectives.items() if waited and not flow.data_read([c])
        ),
    )


class _Flow:
    """Dependences in one step.

    order: position of each node. kinds: each input's slot. nearest: sources of a value. after_update: what depends on
    an update. reads_gradient: what would depend on a gradient if every update left its parameters as they are.
    from_data: what depends on the micro-batch, other than through cuts and updates; from_micro_step: on its noise, too.
    """

    def __init__(
        self, step: Step, effects: list[Node], cuts: list[Node], updates: list[Node]
    ) -> None:
        graph, stops = step.module.graph, dict.fromkeys([*cuts, *updates])
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.kinds = dict(zip(graph.find_nodes(op="placeholder"), step.slots, strict=True))
        self.nearest = Nearest(graph, stops)
        self.after_update = downstream(updates)
        self.reads_gradient = downstream(cuts, without=set(updates))
        self.forward = upstream(cuts)
        self._cuts = frozenset(cuts)
        # A tensor that the step keeps (an average, a count) is no data; an input that it changes is.
        holders = list(self.kinds)
        kept = {argument(write, 0) for write in effects} - self.forward
        kept.update(holders[i] for i in step.replaced)
        given = [
            h
            for h, slot in self.kinds.items()
            # A number (a count, a size) makes no data of what it scales.
            if slot.kind is Kind.DATA and h not in kept and isinstance(h.meta["val"], torch.Tensor)
        ]
        self.from_data = downstream(given, without=stops)
        # Noise that gradients are made of is this micro-step's own, like its data.
        noise = [n for n in self.forward if _draws(n)]
        self.from_micro_step = self.from_data | downstream(noise, without=stops)

    def waits(self, value: object) -> bool:
        """Whether a value is the boundary's."""
        return value in self.reads_gradient or (
            value in self.after_update and value not in self.from_micro_step
        )

    def is_early(self, write: Node) -> bool:
        """Whether what the update of a written parameter would be given is made of data."""
        given = _given_to_update(argument(write, 1))
        trained = self.kinds[argument(write, 0)].kind is Kind.PARAMETER
        return trained and given in self.from_data and given not in self.reads_gradient

    def data_read(self, values: list[Node]) -> tuple[int, ...]:
        """Positions of the user's own tensors that values depend on other than through gradients."""
        seen = upstream(values, without=self._cuts)
        return tuple(s.key for holder, s in self.kinds.items() if holder in seen and _is_data(s))


def _draws(node: Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _is_data(slot: Slot) -> bool:
    return slot.kind is Kind.DATA


def _by_leaf(cuts: list[Node], flow: _Flow) -> dict[int, tuple[Node, ...]]:
    found: dict[int, tuple[Node, ...]] = {}
    for marker in sorted(cuts, key=lambda m: flow.order[argument(m, 0)]):
        leaf = int(argument(marker, 1))
        found[leaf] = (*found.get(leaf, ()), marker)
    return found


def _boundary_writes(effects: list[Node], flow: _Flow) -> dict[Node, Sources]:
    found: dict[Node, Sources] = {}
    for write in effects:
        kind, value = flow.kinds[argument(write, 0)].kind, argument(write, 1)
        each_call = kind is Kind.BUFFER and value in flow.from_data
        depends = value in flow.reads_gradient or (value in flow.after_update and not each_call)
        # A decay, a projection: what a parameter becomes of itself alone belongs to its update.
        alone = kind is Kind.PARAMETER and value not in flow.from_data
        if depends or alone:
            found[write] = flow.nearest.of(value)
    # So does a count that is made of no data and feeds such writes alone: it weighs an average.
    counted: dict[Node, Sources] = {}
    for write in effects:
        holder, value = argument(write, 0), argument(write, 1)
        if write in found or {holder, value} & flow.forward or value in flow.from_data:
            continue
        fed = downstream([holder, value])
        readers = [sources for w, sources in found.items() if argument(w, 1) in fed]
        if readers:
            counted[write] = Sources().union(*readers)
    return found | counted


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
    gradients: dict[int, tuple[Node, ...]], sources: dict[Node, Sources], flow: _Flow
) -> dict[int, int]:
    stage: dict[Node, int] = {}
    stops = [*sources, *(m for markers in gradients.values() for m in markers)]
    for node in sorted(stops, key=flow.order.__getitem__):
        if node in sources:
            stage[node] = max((stage[s] for s in sources[node]), default=0)
        else:
            before = flow.nearest.of(argument(node, 0))
            stage[node] = max((stage[s] + 1 for s in before), default=0)
    return {leaf: stage[markers[0]] for leaf, markers in gradients.items()}


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
    """Leaves whose gradient the user reduces: alone (`hand`), or with others in one flat tensor (`hand_flat`)."""
    alone: dict[int, HandSync] = {}
    flat: set[int] = set()
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
            flat.add(leaf)
    return alone, frozenset(flat)
