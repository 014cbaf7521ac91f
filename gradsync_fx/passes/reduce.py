"""The parts of a window that close, in a step or in the tail: the window's gradient in place of each marker.

boundary   acc + g  \
tail       acc       } -> cat of the bucket -> all_reduce -> wait -> / divisor -> what clipping and the update read

R(sum_i w_i g_i) / D once, where D counts the terms (or adds the weights) of all ranks; synchronising each micro-step
computes sum_i R(g_i / k) / ranks. Equal in exact arithmetic, not bitwise. A bucket's all-reduce starts after its last
add.
"""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.dataflow import read_instead
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.optim.shares import Portion
from gradsync_fx.passes.bucket import reduce_bucket
from gradsync_fx.passes.mask import note_weight
from gradsync_fx.passes.piecewise import read_pieces
from gradsync_fx.passes.sums import accumulator, add_to_accumulator, cast, reset
from gradsync_fx.passes.weigh import (
    gradients_of,
    reduce_all,
    running_weight,
    term_of,
    weights_of,
    with_this_call,
)
from gradsync_fx.planning.plan import Bucket, Plan


_aten = torch.ops.aten
Pieces = dict[Node, tuple[Node, Portion]]


def reduce_window(draft: Draft, plan: Plan) -> None:
    """Boundary program: this micro-step's gradient goes into the window's sum, which is reduced and read instead."""
    terms = gradients_of(draft, plan, plan.closing_buckets())
    weights = weights_of(draft, plan, [b.part for b in terms])
    if plan.sync_each_batch and terms:
        terms, weights = reduce_all(draft, plan, terms, weights, divided=False)
    sums = {
        bucket: [
            add_to_accumulator(draft, plan, leaf, value)
            for leaf, value in zip(bucket.leaves, values, strict=True)
        ]
        for bucket, values in terms.items()
    }
    weights = {part: with_this_call(draft, plan, part, w) for part, w in weights.items()}
    weights, pieces = _hand_on(draft, plan, sums, weights)
    note_weight(draft, plan, weights)
    for bucket in sums:
        pieces |= _reduce_later_gradients(draft, plan, bucket, weights.get(bucket.part))
    read_pieces(draft, plan, pieces)
    draft.sort()  # a gradient may be read before the last one of its bucket: by the update of another model


def reduce_sums(draft: Draft, plan: Plan) -> None:
    """Tail program: the sums as they are, reduced unless every micro-step was."""
    sums = {
        bucket: [accumulator(draft, plan, leaf) for leaf in bucket.leaves]
        for bucket in plan.closing_buckets()
    }
    weights = {
        b.part: running_weight(draft, plan, b.part) for b in sums if plan.weighing is not None
    }
    _, pieces = _hand_on(draft, plan, sums, weights)
    read_pieces(draft, plan, pieces)


def _hand_on(
    draft: Draft, plan: Plan, sums: dict[Bucket, list[Node]], weights: dict[int, Node]
) -> tuple[dict[int, Node], Pieces]:
    """Sums, reduced and divided, to whoever reads the gradients. Returns the reduced weights, and what is divided among
    the ranks: its readers are rewritten when all of it is there.
    """

    def divided() -> dict[Bucket, list[Node]]:
        return {b: _divide(draft, plan, b, v, weights.get(b.part)) for b, v in sums.items()}

    # float16 ends at 65504: what is known beforehand is divided out before it is sent.
    ahead = plan.wire_dtype is torch.float16 and not (plan.weighing and plan.weighing.divides)
    if ahead:
        sums = divided()
    if not plan.sync_each_batch and sums:
        sums, weights = reduce_all(draft, plan, sums, weights, divided=ahead)
    if not ahead:
        sums = divided()
    pieces: Pieces = {}
    for bucket, values in sums.items():
        pieces |= _install(draft, plan, bucket, values)
    return weights, pieces


def _divide(
    draft: Draft, plan: Plan, bucket: Bucket, values: list[Node], weight: Node | None
) -> list[Node]:
    divisor = _divisor(draft, plan, bucket, weight)
    divided = []
    for value in values:
        with draft.after(value, divisor):
            form = value.meta["val"]
            if form.dim():
                quotient = draft.call_known(draft.form(form), _aten.div.Tensor, value, divisor)
            else:  # without dimensions on both sides the wider dtype wins
                quotient = draft.call(_aten.div.Tensor, value, divisor)
            divided.append(quotient)
    return divided


def _divisor(draft: Draft, plan: Plan, bucket: Bucket, weight: Node | None) -> Node:
    which = bucket.reduction.divisor
    if weight is None or plan.weighing is None or not plan.weighing.divides:
        key = ("divisor", which, bucket.part)
        form = torch.empty((), dtype=torch.float64)
        return draft.input(Slot(Kind.SCALAR, f"divisor ({which})", key), form)
    if which == "ranks":
        return weight
    with draft.after(weight):
        return draft.call(_aten.div.Tensor, weight, float(plan.world))


def _install(
    draft: Draft, plan: Plan, bucket: Bucket, values: list[Node], occurrence: int = 0
) -> Pieces:
    pieces: Pieces = {}
    whole: dict[Node, Node] = {}
    for leaf, value in zip(bucket.leaves, values, strict=True):
        marker = draft.of[plan.regions.gradients[leaf][occurrence]]
        hand = plan.regions.hand.get(leaf)
        old = marker if hand is None else draft.of[hand.wait]
        with draft.after(value):
            gradient = cast(draft, value, old.meta["val"].dtype)
        if plan.scatters(bucket) and leaf in plan.pieces:
            pieces[old] = (gradient, plan.pieces[leaf])
            continue
        whole[old] = gradient
    read_instead(whole)
    return pieces


def _reduce_later_gradients(
    draft: Draft, plan: Plan, bucket: Bucket, weight: Node | None
) -> Pieces:
    """Gradients that are zeroed and computed again in one step (windows of one micro-step only): each by itself."""
    markers, pieces = plan.regions.gradients, Pieces()
    for occurrence in range(1, max(len(markers[leaf]) for leaf in bucket.leaves)):
        again = tuple(leaf for leaf in bucket.leaves if len(markers[leaf]) > occurrence)
        part = Bucket(again, bucket.reduction, bucket.part)
        terms = [term_of(draft, plan, leaf, occurrence) for leaf in again]
        reduced = reduce_bucket(draft, plan, part, terms)
        divided = _divide(draft, plan, part, reduced, weight)
        pieces |= _install(draft, plan, part, divided, occurrence)
    return pieces


def reset_accumulators(draft: Draft, plan: Plan) -> None:
    """The window of the closing parts is over: their accumulators and weights become zero."""
    for bucket in plan.closing_buckets():
        for leaf in bucket.leaves:
            reset(draft, accumulator(draft, plan, leaf))
    for part in plan.parts:
        if plan.weighing and part in plan.closing:
            reset(draft, running_weight(draft, plan, part))


def forget_micro_step(draft: Draft, plan: Plan) -> None:
    """Tail program: only the writes of what closes, and only the outputs that it alone can give, in their order."""
    kept = {
        draft.of[w]
        for w, sources in plan.regions.boundary_writes.items()
        if not plan.is_open(sources)
    }
    _update_what_is_there(draft, plan)
    outputs = draft.outputs()
    draft.set_outputs([])
    for write in list(draft.graph.find_nodes(op="call_function", target=_aten.copy_.default)):
        if write not in kept:
            draft.drop_write(write)
    draft.set_outputs([outputs[i] for i in plan.regions.tail_outputs])


def _update_what_is_there(draft: Draft, plan: Plan) -> None:
    """Updates take parameters as they are, where forward wrote them: the calls of the window have done that."""
    for write in plan.regions.early_writes:
        result = argument(write, 1)
        while result.target is operator.getitem:
            update = draft.of[argument(result, 0)]
            given = list(argument(update, 2))
            index = argument(result, 1)
            result = argument(argument(result, 0), 2)[index]
            given[index] = argument(draft.of[write], 0)
            update.update_arg(2, given)
