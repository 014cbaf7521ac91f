"""One all-reduce for a bucket of tensors: cat -> all_reduce -> wait -> slices, and nothing where there is no group."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from gradsync_fx import ops
from gradsync_fx.draft import Draft
from gradsync_fx.passes.sums import cast
from gradsync_fx.plan import Bucket, Plan


_aten = torch.ops.aten


def reduce_bucket(
    draft: Draft,
    plan: Plan,
    bucket: Bucket,
    terms: list[Node],
    *,
    wire_dtype: torch.dtype | None = None,
    behind: Sequence[Node] = (),
) -> list[Node]:
    """The terms, one for each leaf of the bucket, summed over the ranks by one all-reduce; dtypes as before.

    wire_dtype: on the wire, for this bucket alone; by default the plan's, or the first term's own. behind: nodes that
    the all-reduce has to stand behind as well.
    """
    group = bucket.reduction.group
    if group is None:
        return terms
    wire_dtype = wire_dtype or plan.wire_dtype or terms[0].meta["val"].dtype
    with draft.after(*terms, *behind):
        wire = [cast(draft, t, wire_dtype) for t in terms]
        counts = [w.meta["val"].numel() for w in wire]
        one = [draft.form(w.meta["val"], shape=[n]) for w, n in zip(wire, counts, strict=True)]
        pieces = [
            draft.call_known(form, _aten.reshape.default, w, [-1])
            for form, w in zip(one, wire, strict=True)
        ]
        flat = pieces[0]
        if len(pieces) > 1:
            form = draft.form(one[0], shape=[sum(counts)])
            flat = draft.call_known(form, _aten.cat.default, pieces)
        form = draft.form(flat.meta["val"])  # another storage than what is sent
        started = draft.call_known(form, ops.ALL_REDUCE, flat, bucket.reduction.op, group)
        started.meta["bucket"] = True  # for the lowering
        waited = draft.call_known(form, ops.WAIT, started)
        reduced, start = [], 0
        for term, form, count in zip(terms, one, counts, strict=True):
            value = term.meta["val"]
            piece = draft.call_known(form, _aten.slice.Tensor, waited, 0, start, start + count)
            whole = draft.form(form, shape=value.shape)
            view = draft.call_known(whole, _aten.reshape.default, piece, list(value.shape))
            reduced.append(cast(draft, view, value.dtype))
            start += count
    return reduced
