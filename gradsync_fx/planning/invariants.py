"""What a window computes once: values made of parameters alone, and linear work on its gradients.

held      values that the prologue program computes when a window opens, and that other programs read
summed    values that accumulate programs sum ahead of linear work (deferred.py), which the fold program does once

Which of all that could be held is chosen by the rule in worth.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node, map_arg

from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.flops import bytes_of_value
from gradsync_fx.ir.linear import LinearIn, invariant_nodes
from gradsync_fx.ir.memory import base_of_views
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot, output_values, writes
from gradsync_fx.planning import worth
from gradsync_fx.planning.deferred import find_deferred
from gradsync_fx.planning.kept import Deferred, Invariants
from gradsync_fx.planning.plan import Bucket, Plan, Reduction


@dataclass(slots=True)
class _Unit:
    """Values and sums that are made of the same tensors: kept together, or not at all."""

    tensors: set[Node]
    frontier: list[Node]
    deferred: list[Deferred]

    @property
    def bytes(self) -> int:
        held = {*self.frontier, *(n for d in self.deferred for n in d.reads)}
        return sum(map(bytes_of_value, held)) + sum(d.bytes for d in self.deferred)


def find_invariants(plan: Plan, k: int) -> Invariants:
    """Chooses for windows of k calls. Nothing is held at k = 1, nor where parameters arrive while a call runs."""
    analysis = _Analysis(plan)
    if k < 2 or plan.arriving or not analysis.invariant:
        return Invariants(analysis.invariant)
    rates = worth.rates_of(analysis.device)
    deferred = [
        group
        for group in analysis.deferred(rates)
        if worth.pays(k * group.saved - group.once, 0.0)
        and _of_one_part(plan, group)
        and all(map(_is_dense, group.reads))
    ]
    units = _units(analysis, analysis.frontier(deferred), deferred)
    chosen: list[_Unit] = []
    call = worth.seconds(analysis.live, rates)
    saved, left = 0.0, worth.memory_left(analysis.device)
    gains = [(_gain(analysis, unit, rates, k), unit) for unit in units]
    for gain, unit in sorted(gains, key=lambda g: -g[0] / max(g[1].bytes, 1)):
        if worth.pays(gain, k * call, worth.LEAST_OF_ONE) and unit.bytes <= left:
            chosen.append(unit)
            saved, left = saved + gain / k, left - unit.bytes
    if not worth.pays(saved, call, worth.LEAST):
        return Invariants(analysis.invariant, call=call)
    return _invariants(analysis, chosen, saved, call)


class _Analysis:
    """One step's calls as they accumulate.

    steady: placeholders that nothing writes inside a window. live: what an accumulate call computes.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan, step, regions = plan, plan.step, plan.regions
        graph = step.module.graph
        written = {
            argument(w, 0)
            for w in writes(step.module)
            if w not in regions.boundary_writes or w in regions.early_writes
        }
        self.slots: dict[Node, Slot] = dict(
            zip(graph.find_nodes(op="placeholder"), step.slots, strict=True)
        )
        self.steady = {
            holder
            for holder, slot in self.slots.items()
            if slot.kind in (Kind.PARAMETER, Kind.BUFFER)
            and isinstance(holder.meta["val"], torch.Tensor)
            and holder not in written
        }
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self.invariant = invariant_nodes(graph, self.steady)
        self.linear = LinearIn(self.steady, self.invariant, regions.partial)
        self.markers = {
            leaf: found[0] for leaf, found in regions.gradients.items() if len(found) == 1
        }
        several = [
            argument(m, 0) for found in regions.gradients.values() for m in found if len(found) > 1
        ]
        outputs = output_values(step.module)
        self.roots: list[Node] = [
            *several,
            *(
                argument(w, 1)
                for w in writes(step.module)
                if w not in regions.boundary_writes or w in regions.early_writes
            ),
            *(
                n
                for i, n in enumerate(outputs)
                if isinstance(n, Node)
                and i not in regions.boundary_outputs
                and n.target is not ops.NOTE
            ),
            *(
                argument(n, 1)
                for n in graph.find_nodes(op="call_function", target=ops.NOTE)
                if argument(n, 2) in (ops.Role.WEIGHT, ops.Role.LOSS)
            ),
            *(c for c, sources in regions.collectives.items() if not sources),
        ]
        self.live = self._live([])

    @property
    def device(self) -> torch.device:
        return next((h.meta["val"].device for h in self.steady), torch.device("cpu"))

    def deferred(self, rates: worth.Rates) -> list[Deferred]:
        """Sums that could be taken ahead of linear work; none where each call's gradient itself is asked for."""
        plan = self.plan
        if plan.sync_each_batch or (plan.weighing is not None and plan.weighing.finite):
            return []
        own = [argument(m, 0) for leaf, m in self.markers.items() if not self._is_wide(leaf)]
        markers = {leaf: m for leaf, m in self.markers.items() if self._is_wide(leaf)}
        return find_deferred(markers, self.linear, [*self.roots, *own], rates)

    def _is_wide(self, leaf: int) -> bool:
        """Whether a leaf's terms have the dtype of its sum already."""
        total = self.plan.accumulators[self.plan.step.leaves[leaf].name]
        value = argument(self.markers[leaf], 0).meta["val"]
        return bool(value.dtype == total.dtype and total.dtype.itemsize >= 4)

    def _live(self, deferred: Collection[Deferred]) -> set[Node]:
        """What an accumulate call computes beside these sums' work."""
        ends = [n for d in deferred for n in d.sources]
        ends += [n for d in deferred for others in d.others.values() for n in others]
        elsewhere = {leaf for d in deferred for leaf in d.others}
        own = [argument(m, 0) for leaf, m in self.markers.items() if leaf not in elsewhere]
        return upstream([*self.roots, *own, *ends])

    def frontier(self, deferred: Collection[Deferred]) -> list[Node]:
        """The invariant values that the rest of an accumulate call reads, in order."""
        live = self._live(deferred)
        read = {
            base_of_views(n)
            for node in live
            if node not in self.invariant
            for n in node.all_input_nodes
            if n in self.invariant
        }
        held = (n for n in read if n in self.invariant and n.all_input_nodes and _is_dense(n))
        return sorted(held, key=self.order.__getitem__)

    def cone(self, nodes: Iterable[Node]) -> set[Node]:
        """The invariant nodes and steady tensors that these are made of, themselves among them."""
        return upstream(nodes)

    def tensors(self, nodes: Iterable[Node]) -> set[Node]:
        return {n for n in self.cone(nodes) if n in self.steady}


def with_early_sums(kept: Invariants, wanted: Callable[[Deferred], bool]) -> Invariants:
    """The same values, and these groups of sums alone; all other terms go into their own parameter's sum."""
    deferred = tuple(group for group in kept.deferred if wanted(group))
    sources = {n for group in deferred for n in group.sources}
    return replace(
        kept,
        deferred=deferred,
        numbers={n: number for n, number in kept.numbers.items() if n in sources},
    )


def summing_early(plan: Plan) -> Plan:
    """The plan of an accumulate program whose gradients are, for some leaves, what their linear work begins with."""
    kept = plan.invariants
    if not kept.deferred:
        return plan
    early = kept.sums(plan.step.leaves)
    gradients, parts = dict(plan.regions.gradients), dict(plan.part_of_leaf)
    buckets = list(plan.buckets)
    for group in kept.deferred:
        part = parts[next(iter(group.others))]
        gone = {leaf for leaf, others in group.others.items() if not others}
        for leaf in gone:
            del gradients[leaf]
        buckets = [replace(b, leaves=tuple(n for n in b.leaves if n not in gone)) for b in buckets]
        for source in group.sources:
            number = kept.numbers[source]
            gradients[number], parts[number] = (source,), part
            buckets.append(Bucket((number,), Reduction("sum", None, "ranks"), part))
    sums = {leaf.name: leaf.parameter for leaf in early.values()}
    return replace(
        plan,
        step=replace(plan.step, leaves={**plan.step.leaves, **early}),
        regions=replace(plan.regions, gradients=gradients),
        part_of_leaf=parts,
        accumulators={**plan.accumulators, **sums},
        buckets=tuple(b for b in buckets if b.leaves),
    )


def _of_one_part(plan: Plan, group: Deferred) -> bool:
    """Whether one program closes all of its leaves."""
    return len({plan.part_of_leaf[leaf] for leaf in group.others}) == 1


def _is_dense(node: Node) -> bool:
    """Whether a value fills memory of its own, element beside element."""
    value = node.meta["val"]
    return isinstance(value, torch.Tensor) and torch.empty_like(value).stride() == value.stride()


def _units(analysis: _Analysis, frontier: list[Node], deferred: list[Deferred]) -> list[_Unit]:
    """Values and sums by the tensors that they are made of; what is made of none is by itself."""
    parts = [_Unit(analysis.tensors([n]), [n], []) for n in frontier]
    parts += [_Unit(analysis.tensors(d.reads), [], [d]) for d in deferred]
    units: list[_Unit] = []
    unit_of: dict[Node, _Unit] = {}
    for part in parts:
        for known in {id(u): u for t in part.tensors if (u := unit_of.get(t))}.values():
            part.tensors |= known.tensors
            part.frontier = known.frontier + part.frontier
            part.deferred = known.deferred + part.deferred
            units = [u for u in units if u is not known]
        units.append(part)
        unit_of.update(dict.fromkeys(part.tensors, part))
    return units


def _gain(analysis: _Analysis, unit: _Unit, rates: worth.Rates, k: int) -> float:
    """Seconds that a window saves where this is kept."""
    cone = {n for n in analysis.cone(unit.frontier) if n.op == "call_function"}
    work = worth.seconds(cone, rates)
    held = sum(bytes_of_value(n) for n in unit.frontier)
    fused = sum(bytes_of_value(n) for n in unit.frontier if not worth.lies_in_memory(n))
    each = work - fused / rates.bandwidth
    checked = worth.checking([bytes_of_value(t) for t in unit.tensors], rates)
    later = sum(k * d.saved - d.once for d in unit.deferred)
    return k * (each - checked) - work - worth.copying(held, rates) + later


def _invariants(analysis: _Analysis, units: list[_Unit], saved: float, call: float) -> Invariants:
    deferred = tuple(d for unit in units for d in unit.deferred)
    frontier = {n for unit in units for n in unit.frontier}
    wanted = sorted(
        frontier.union(n for d in deferred for n in d.reads), key=analysis.order.__getitem__
    )
    texts: dict[Node, tuple[object, ...]] = {}
    first: dict[tuple[object, ...], Node] = {}
    for node in sorted(analysis.cone(wanted), key=analysis.order.__getitem__):
        texts[node] = _computation(node, texts, first)
        first.setdefault(texts[node], node)
    same = {n: first[texts[n]] for n in analysis.cone(wanted) if n.op == "call_function"}
    held = tuple(dict.fromkeys(same.get(n, n) for n in wanted))
    tensors = analysis.tensors(wanted)
    return Invariants(
        found=analysis.invariant,
        held=held,
        read=frozenset(same.get(n, n) for n in frontier),
        same={n: h for n, h in same.items() if h in held},
        steady=frozenset(analysis.steady),
        deferred=deferred,
        numbers={
            n: number
            for number, n in enumerate(
                (n for d in deferred for n in d.sources),
                max(analysis.plan.step.leaves, default=-1) + 1,
            )
        },
        watched=tuple(sorted(analysis.slots[t].key for t in tensors)),
        saved=saved,
        call=call,
    )


def _computation(
    node: Node, texts: dict[Node, tuple[object, ...]], first: dict[tuple[object, ...], Node]
) -> tuple[object, ...]:
    """Equal for two nodes exactly when they compute the same of the same tensors."""
    if node.op != "call_function":
        return (node.op, node.name)

    def named(n: Node) -> str:
        return f"%{first[texts[n]].name}"

    return (node.target, repr(map_arg(node.args, named)), repr(map_arg(node.kwargs, named)))
