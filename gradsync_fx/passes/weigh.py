"""Weights: each gradient becomes its term of the window's sum, and the running weight goes along with it.

g  ->  g * w                       reduction="weighted"
g  ->  g where finite, else 0      skip_nonfinite; then w is 1 or 0, or the step's own weight or 0

The running weight of a part is an input like an accumulator. Where the sums are divided by it, it is sent with the
first bucket whose wire is at least as wide as float32, and alone where there is none: a weight that was rounded to
bfloat16 would scale every gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch.fx import Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.ops import Role, argument
from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.passes.bucket import WireScale, reduce_bucket
from gradsync_fx.passes.sums import cast, filled
from gradsync_fx.planning.plan import (
    Bucket,
    Plan,
    Reduction,
    scales_wire,
    sending_order,
    wire_scale,
)


_aten = torch.ops.aten


def weigh_terms(draft: Draft, plan: Plan) -> None:
    """Puts each gradient's term in its place, and leaves this call's weight in the draft's notes."""
    if plan.weighing is None:
        return
    markers = [draft.of[m] for found in plan.regions.gradients.values() for m in found]
    weight = _weight(draft, plan)
    finite = _all_finite(draft, markers, weight) if plan.weighing.finite else None
    if finite is not None:
        with draft.after(finite, weight):
            zero = filled(draft, 0.0, weight.meta["val"])
            weight = draft.call(_aten.where.self, finite, weight, zero)
    for marker in markers:
        leaf = plan.step.leaves[argument(marker, 1)]
        gradient = argument(marker, 0)
        needed = [gradient, weight] + ([finite] if finite is not None else [])
        with draft.after(*needed):
            term = cast(draft, gradient, plan.accumulators[leaf.name].dtype)
            if plan.weighing.weighted:
                term = draft.call(_aten.mul.Tensor, term, weight)
            if finite is not None:
                zero = filled(draft, 0.0, term.meta["val"])
                term = draft.call(_aten.where.self, finite, term, zero)
        marker.update_arg(0, term)
    draft.notes[Role.WEIGHT, 0] = [weight]
    draft.sort()  # a weight may be said, and a last loss computed, after the first gradients


def _weight(draft: Draft, plan: Plan) -> Node:
    """This call's weight as a tensor without dimensions, in the running weight's dtype and on its device."""
    assert plan.weighing is not None
    form = next(iter(plan.weights.values()))
    noted = draft.note(Role.WEIGHT) if plan.weighing.weighted else None
    if noted is None:
        with draft.at_start():
            return filled(draft, 1.0, form)
    with draft.after(noted):
        scalar = draft.call(_aten.reshape.default, noted, [])
        if noted.meta["val"].device != form.device:
            return draft.call(_aten._to_copy.default, scalar, dtype=form.dtype, device=form.device)
        return cast(draft, scalar, form.dtype)


def _all_finite(draft: Draft, markers: list[Node], weight: Node) -> Node:
    """x * 0 is 0 exactly where x is finite: the sum of all of them is compared with 0."""
    losses = draft.notes.get((Role.LOSS, 0), [])
    values = [argument(m, 0) for m in markers] + losses + [weight]
    with draft.after(*values):
        parts = []
        for value in values:
            if value.meta["val"].is_complex():
                value = draft.call(_aten.view_as_real.default, value)
            nothing = draft.call(_aten.mul.Tensor, value, 0.0)
            total = draft.call(_aten.sum.default, nothing)
            parts.append(cast(draft, total, torch.float32))
        total = parts[0]
        for part in parts[1:]:
            total = draft.call(_aten.add.Tensor, total, part)
        return draft.call(_aten.eq.Scalar, total, 0.0)


def gradients_of(draft: Draft, plan: Plan, buckets: Iterable[Bucket]) -> dict[Bucket, list[Node]]:
    """This call's term of each leaf, by bucket."""
    return {b: [term_of(draft, plan, leaf) for leaf in b.leaves] for b in buckets}


def term_of(draft: Draft, plan: Plan, leaf: int, occurrence: int = 0) -> Node:
    """The gradient that a leaf is given, in its accumulator's dtype: the one that is summed, here and over ranks."""
    gradient = argument(draft.of[plan.regions.gradients[leaf][occurrence]], 0)
    with draft.after(gradient):
        return cast(draft, gradient, plan.accumulators[plan.step.leaves[leaf].name].dtype)


def weights_of(draft: Draft, plan: Plan, parts: Iterable[int]) -> dict[int, Node]:
    """This call's weight, for each of these parts; empty where nothing is weighed."""
    weight = draft.note(Role.WEIGHT) if plan.weighing else None
    return {} if weight is None else dict.fromkeys(parts, weight)


def running_weight(draft: Draft, plan: Plan, part: int) -> Node:
    """The input that holds the weight of a part's terms so far."""
    return draft.input(Slot(Kind.WEIGHT, f"weight of part {part}", part), plan.weights[part])


def with_this_call(draft: Draft, plan: Plan, part: int, weight: Node) -> Node:
    """The running weight, and this call's added to it."""
    held = running_weight(draft, plan, part)
    with draft.after(weight):
        return draft.call(_aten.add.Tensor, held, weight)


def reduce_all(
    draft: Draft,
    plan: Plan,
    terms: dict[Bucket, list[Node]],
    weights: dict[int, Node],
    *,
    divided: bool,
) -> tuple[dict[Bucket, list[Node]], dict[int, Node]]:
    """All buckets over the ranks, each by one all-reduce, and each part's weight with one of its buckets.

    divided: whether the terms are means already. A float16 wire ends at 65504: other terms are scaled for it, so that
    what arrives is no larger than their mean. That needs the weights first; they go before all buckets, then.
    """
    scaled = scales_wire(plan) and not divided
    done = dict(weights)
    reduced: dict[Bucket, list[Node]] = {}
    last = next(reversed(terms.values()), [])
    for sent in sending_order(plan, terms, weights, scaled=scaled):
        bucket, part = sent.bucket, sent.weight
        if bucket is not None:
            scale = _scale(draft, plan, done.get(bucket.part)) if scaled else None
            carried = [] if part is None else [weights[part]]
            values = reduce_bucket(draft, plan, bucket, [*terms[bucket], *carried], scale=scale)
            if part is not None:
                done[part] = values.pop()
            reduced[bucket] = values
        elif part is not None:
            after = () if sent.early else last
            done[part] = _reduce_weight(
                draft, plan, part, weights[part], after=after, early=sent.early
            )
    return reduced, done


def _reduce_weight(
    draft: Draft,
    plan: Plan,
    part: int,
    weight: Node,
    *,
    after: Sequence[Node] = (),
    early: bool = False,
) -> Node:
    """A part's weight over the ranks, by an all-reduce of its own. early: buckets wait for it."""
    alone = Bucket((), Reduction("sum", plan.group, "ranks"), part)
    own = weight.meta["val"].dtype
    (total,) = reduce_bucket(draft, plan, alone, [weight], wire_dtype=own, after=after, early=early)
    return total


def _scale(draft: Draft, plan: Plan, weight: Node | None) -> WireScale:
    """2 to the power that makes the sum over `weight` (of all ranks) no larger than the mean."""
    if weight is None:
        power = wire_scale(plan.world)
        return WireScale(1 / power, power)
    with draft.after(weight):
        one = filled(draft, 1.0, weight.meta["val"])
        some = draft.call(_aten.gt.Scalar, weight, 0.0)
        counted = draft.call(_aten.where.self, some, weight, one)
        exponent = draft.call(_aten.ceil.default, draft.call(_aten.log2.default, counted))
        inverse = draft.call(_aten.exp2.default, exponent)
        return WireScale(draft.call(_aten.reciprocal.default, inverse), inverse)
