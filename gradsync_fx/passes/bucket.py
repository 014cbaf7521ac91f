"""One all-reduce for a bucket of tensors: cat -> all_reduce -> wait -> slices, and nothing where there is no group.

What is sent is laid out as flat_buffers.py lays out running sums: with gaps, of zeros, where that has some.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from gradsync_fx.comm.flat_buffers import stretches
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import Draft
from gradsync_fx.passes.scatter import scatter
from gradsync_fx.passes.sums import as_pairs, cast, shaped
from gradsync_fx.planning.plan import Bucket, Plan


_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class WireScale:
    """A power of two that terms are multiplied by before they are sent, and what undoes it."""

    factor: Node | float
    inverse: Node | float

    @property
    def nodes(self) -> list[Node]:
        """What has to be there before it is used."""
        return [n for n in (self.factor, self.inverse) if isinstance(n, Node)]


def reduce_bucket(
    draft: Draft,
    plan: Plan,
    bucket: Bucket,
    terms: list[Node],
    *,
    wire_dtype: torch.dtype | None = None,
    after: Sequence[Node] = (),
    scale: WireScale | None = None,
    early: bool = False,
) -> list[Node]:
    """The terms, one for each leaf of the bucket, summed over the ranks by one all-reduce; dtypes as before.

    wire_dtype: on the wire, for this bucket alone; by default the plan's, or the first term's own. after: further
    nodes that the all-reduce has to stand after. scale: what terms are multiplied by while they are sent. Complex terms
    are sent as pairs of real numbers. early: other reductions need the result.
    """
    group = bucket.reduction.group
    if group is None:
        return terms
    wire_dtype = wire_dtype or plan.wire_dtype or terms[0].meta["val"].dtype.to_real()
    if plan.scatters(bucket):
        return _scattered(draft, plan, bucket, terms, wire_dtype, scale)
    with draft.after(*terms, *after, *(scale.nodes if scale else ())):
        sent = terms if scale is None else [_times(draft, t, scale.factor) for t in terms]
        pairs = [as_pairs(draft, t) for t in sent]
        wire = [cast(draft, p, wire_dtype) for p in pairs]
        counts = [w.meta["val"].numel() for w in wire]
        one = [draft.form(w.meta["val"], shape=[n]) for w, n in zip(wire, counts, strict=True)]
        pieces = [
            draft.call_known(form, _aten.reshape.default, w, [-1])
            for form, w in zip(one, wire, strict=True)
        ]
        whole = stretches(one)
        for i, (form, size) in enumerate(zip(one, whole, strict=True)):
            if size > counts[i]:
                form = draft.form(form, shape=[size])
                gap = [0, size - counts[i]]
                pieces[i] = draft.call_known(form, _aten.constant_pad_nd.default, pieces[i], gap)
        flat = pieces[0]
        if len(pieces) > 1:
            form = draft.form(one[0], shape=[sum(whole)])
            flat = draft.call_known(form, _aten.cat.default, pieces)
        form = draft.form(flat.meta["val"])  # another storage than what is sent
        started = draft.call_known(form, ops.ALL_REDUCE, flat, bucket.reduction.op, group)
        started.meta["bucket"], started.meta["early"] = True, early  # for the lowering
        waited = draft.call_known(form, ops.WAIT, started)
        reduced, start = [], 0
        for pair, term, form, count, size in zip(pairs, terms, one, counts, whole, strict=True):
            value = pair.meta["val"]
            piece = draft.call_known(form, _aten.slice.Tensor, waited, 0, start, start + count)
            form = draft.form(form, shape=value.shape)
            view = draft.call_known(form, _aten.reshape.default, piece, list(value.shape))
            total = cast(draft, view, value.dtype)
            if term.meta["val"].is_complex():
                total = draft.call_known(
                    draft.form(term.meta["val"]), _aten.view_as_complex.default, total
                )
            reduced.append(total if scale is None else _times(draft, total, scale.inverse))
            start += size
    return reduced


def _scattered(
    draft: Draft,
    plan: Plan,
    bucket: Bucket,
    terms: list[Node],
    wire_dtype: torch.dtype,
    scale: WireScale | None,
) -> list[Node]:
    """This rank's pieces of the sums of what is shared out; the sums of the rest, by an all-reduce."""
    leaves = bucket.leaves
    found: dict[int, Node] = {}
    rest = tuple(leaf for leaf in leaves if leaf not in plan.pieces)
    if rest:
        of = dict(zip(leaves, terms, strict=True))
        part = Bucket(rest, bucket.reduction, bucket.part)
        mine = [of[leaf] for leaf in rest]
        found.update(
            zip(
                rest,
                reduce_bucket(draft, plan, part, mine, wire_dtype=wire_dtype, scale=scale),
                strict=True,
            )
        )
    shared = [(leaf, term) for leaf, term in zip(leaves, terms, strict=True) if leaf in plan.pieces]
    group = bucket.reduction.group
    assert group is not None
    with draft.after(*terms, *(scale.nodes if scale else ())):
        sent = [t if scale is None else _times(draft, t, scale.factor) for _, t in shared]
        pairs = [as_pairs(draft, t) for t in sent]
        pieces = [plan.pieces[leaf] for leaf, _ in shared]
        totals = scatter(draft, plan, pieces, pairs, bucket.reduction.op, group, wire_dtype)
        for (leaf, term), total in zip(shared, totals, strict=True):
            value = term.meta["val"]
            if value.is_complex():
                form = draft.form(value, shape=[total.meta["val"].numel() // 2])
                total = shaped(draft, total, form)
            found[leaf] = total if scale is None else _times(draft, total, scale.inverse)
    return [found[leaf] for leaf in leaves]


def _times(draft: Draft, term: Node, factor: Node | float) -> Node:
    """A product in the dtype of the term."""
    if isinstance(factor, Node):
        factor = cast(draft, factor, term.meta["val"].dtype.to_real())
    return draft.call_known(draft.form(term.meta["val"]), _aten.mul.Tensor, term, factor)
