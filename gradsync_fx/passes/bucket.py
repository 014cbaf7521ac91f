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
        pieces = [draft.call(_aten.reshape.default, w, [-1]) for w in wire]
        flat = pieces[0] if len(pieces) == 1 else draft.call(_aten.cat.default, pieces)
        started = draft.call(ops.ALL_REDUCE, flat, bucket.reduction.op, group)
        started.meta["bucket"] = True  # for the lowering
        waited = draft.call(ops.WAIT, started)
        reduced, start = [], 0
        for term in terms:
            shape, count = list(term.meta["val"].shape), term.meta["val"].numel()
            piece = draft.call(_aten.slice.Tensor, waited, 0, start, start + count)
            view = draft.call(_aten.reshape.default, piece, shape)
            reduced.append(cast(draft, view, term.meta["val"].dtype))
            start += count
    return reduced
