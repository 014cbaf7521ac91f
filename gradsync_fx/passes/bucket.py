"""One all-reduce for a bucket of tensors: cat -> all_reduce -> wait -> slices, and nothing where there is no group."""

from __future__ import annotations

import torch
from torch.fx import Node

from gradsync_fx import ops
from gradsync_fx.draft import Draft
from gradsync_fx.passes.sums import cast
from gradsync_fx.plan import Bucket, Plan


_aten = torch.ops.aten


def reduce_bucket(draft: Draft, plan: Plan, bucket: Bucket, terms: list[Node]) -> list[Node]:
    """The terms, one for each leaf of the bucket, summed over the ranks by one all-reduce; dtypes as before."""
    group = bucket.reduction.group
    if group is None:
        return terms
    with draft.after(*terms):
        wire = [cast(draft, t, plan.wire_dtype or t.meta["val"].dtype) for t in terms]
        pieces = [draft.call(_aten.reshape.default, w, [-1]) for w in wire]
        flat = pieces[0] if len(pieces) == 1 else draft.call(_aten.cat.default, pieces)
        started = draft.call(ops.ALL_REDUCE, flat, bucket.reduction.op, group)
        waited = draft.call(ops.WAIT, started)
        reduced, start = [], 0
        for term in terms:
            shape, count = list(term.meta["val"].shape), term.meta["val"].numel()
            piece = draft.call(_aten.slice.Tensor, waited, 0, start, start + count)
            view = draft.call(_aten.reshape.default, piece, shape)
            reduced.append(cast(draft, view, term.meta["val"].dtype))
            start += count
    return reduced
