"""What a window computes once, in programs of its own.

prologue     parameters -> held values               runs when a window opens
accumulate   held values, micro-batch -> sums        no op of a held value; sums are taken ahead of linear work
boundary     held values, micro-batch, such sums     the linear work, once, on the way to the reduction
fold         held values, such sums -> accumulators  the linear work before anything else; the sums become zero
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch.fx import Node, map_arg

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.linear import LinearIn
from gradsync_fx.ir.memory import base_of_views
from gradsync_fx.ir.ops import LEAF_GRAD, argument
from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.passes.sums import accumulator, add_to_accumulator, reset
from gradsync_fx.planning.plan import Plan


_aten = torch.ops.aten


def read_invariants(draft: Draft, plan: Plan) -> None:
    """Held values are inputs; what a caller is given of them is a copy."""
    holders = set(_read(draft, plan, plan.invariants.read).values())
    outputs = draft.outputs()
    (end,) = draft.graph.find_nodes(op="output")
    for i, value in enumerate(outputs):
        if isinstance(value, Node) and base_of_views(value) in holders:
            with draft.graph.inserting_before(end):
                outputs[i] = draft.call(_aten.clone.default, value)
    draft.set_outputs(outputs)


def sum_early(draft: Draft, plan: Plan) -> None:
    """Accumulate program: sums are taken ahead of linear work. Its plan is that of `summing_early`."""
    kept = plan.invariants
    if plan.closing:
        return
    for group in kept.deferred:
        for leaf, others in group.others.items():
            if others:
                ends = {n: draft.of[n] for n in others}
                (marker,) = plan.regions.gradients[leaf]
                rest = _LinearPart(draft, plan, ends, group.sources).of(argument(marker, 0))
                draft.of[marker].update_arg(0, rest)
    for source, number in kept.numbers.items():
        value = draft.of[source]
        with draft.after(value):
            form = draft.form(value.meta["val"])
            draft.of[source] = draft.call_known(form, LEAF_GRAD, value, number)
    if kept.deferred:
        draft.sort()


def work_on_sums(draft: Draft, plan: Plan) -> None:
    """Boundary program: the linear work is done on the sums so far and this call's terms together."""
    if not plan.closing or not plan.invariants.deferred:
        return
    totals = _early_sums(draft, plan)
    for group in plan.invariants.deferred:
        ends = {}
        for source in group.sources:
            value = draft.of[source]
            with draft.after(value, totals[source]):
                ends[source] = draft.call(_aten.add.Tensor, totals[source], value)
        parts: dict[tuple[Node, ...], _LinearPart] = {}
        for leaf, others in group.others.items():
            (marker,) = plan.regions.gradients[leaf]
            if others not in parts:  # an op may work for several leaves
                found = {**ends, **{n: draft.of[n] for n in others}}
                parts[others] = _LinearPart(draft, plan, found, ())
            draft.of[marker].update_arg(0, parts[others].of(argument(marker, 0)))
    draft.sort()


def hold_values(draft: Draft, plan: Plan) -> None:
    """Prologue program: each held value is written into its place, and nothing else is computed."""
    held = [(node, draft.of[node]) for node in plan.invariants.held]
    draft.leave_only([value for _, value in held])
    for node, value in held:
        draft.write(_holder(draft, plan, node), value)


def fold_sums(draft: Draft, plan: Plan) -> None:
    """Fold program: acc + L(sum) -> acc for each leaf, and 0 -> sum. Its plan is that of the whole step."""
    kept = plan.invariants
    _read(draft, plan, kept.held)
    totals = _early_sums(draft, plan)
    written: dict[Node, Node] = {}
    for group in kept.deferred:
        ends = {source: totals[source] for source in group.sources}
        parts: dict[tuple[Node, ...], _LinearPart] = {}
        for leaf, others in group.others.items():
            (marker,) = plan.regions.gradients[leaf]
            if others not in parts:
                parts[others] = _LinearPart(draft, plan, ends, others)
            value = parts[others].of(argument(marker, 0))
            assert value is not None
            written[accumulator(draft, plan, leaf)] = add_to_accumulator(draft, plan, leaf, value)
    draft.leave_only(list(written.values()))
    for holder, value in written.items():
        draft.write(holder, value)
    for total in totals.values():
        reset(draft, total)
    draft.sort()


def _early_sums(draft: Draft, plan: Plan) -> dict[Node, Node]:
    """The inputs that hold the early sums, by what is summed."""
    early, totals = plan.invariants.sums(plan.step.leaves), {}
    for source, number in plan.invariants.numbers.items():
        name, form = early[number].name, early[number].parameter
        totals[source] = draft.input(Slot(Kind.ACCUMULATOR, name, name), form)
    return totals


def _read(draft: Draft, plan: Plan, nodes: Collection[Node]) -> dict[Node, Node]:
    """Inputs in place of these held values, and of all that compute the same."""
    holders = {node: _holder(draft, plan, node) for node in plan.invariants.held if node in nodes}
    same = {**plan.invariants.same, **{node: node for node in holders}}
    for node, held in same.items():
        if held in holders:
            draft.of[node].replace_all_uses_with(holders[held])
            draft.of[node] = holders[held]
    return holders


def _holder(draft: Draft, plan: Plan, node: Node) -> Node:
    number = plan.invariants.held.index(node)
    return draft.input(
        Slot(Kind.INVARIANT, plan.invariants.name_of(node), number), node.meta["val"]
    )


class _LinearPart:
    """What a linear value is made of when some of what it begins with is zero.

    ends: where its paths begin, with what stands there. zero: the other beginnings.
    """

    def __init__(
        self, draft: Draft, plan: Plan, ends: Mapping[Node, Node], zero: Collection[Node]
    ) -> None:
        kept = plan.invariants
        self._draft, self._ends, self._zero = draft, ends, zero
        self._linear = LinearIn(kept.steady, kept.found, plan.regions.partial)
        self._made: dict[Node, Node | None] = {}

    def of(self, node: Node) -> Node | None:
        """None for zero."""
        if node in self._ends:
            return self._ends[node]
        if node in self._zero:
            return None
        if node not in self._made:
            self._made[node] = self._make(node)
        return self._made[node]

    def _make(self, node: Node) -> Node | None:
        inputs = self._linear.inputs(node)
        parts = {n: part for n in inputs if (part := self.of(n)) is not None}
        if not parts or node.target is LEAF_GRAD:
            return next(iter(parts.values()), None)
        draft = self._draft
        if len(parts) == len(inputs) and all(draft.of[n] is part for n, part in parts.items()):
            return draft.of[node]
        if len(parts) < len(inputs):
            ((of, part),) = parts.items()
            if node.target is not _aten.sub.Tensor or of is node.args[0]:
                return part
            with draft.after(part):
                return draft.call(_aten.neg.default, part)
        args = map_arg(node.args, lambda n: parts[n] if n in parts else draft.of[n])
        with draft.after(*parts.values()):
            made = draft.call(node.target, *args, **node.kwargs)  # type: ignore[arg-type]
        made.meta["stack_trace"] = node.meta.get("stack_trace")
        return made
