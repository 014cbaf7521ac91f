"""A window in which no term counted, masked in the boundary program: only the device knows, and nobody waits for it.

update  ->  p', m'          becomes          where(w > 0, p', p), where(w > 0, m', m)

w is the window's weight over all ranks. Where it is 0 (or not a number) every tensor that the boundary writes stays as
it was, and an output that only an update can give is NaN: what a call does that makes no update. The weight itself is
the program's last output, from which the host learns later whether there was an update (runtime/outcome.py).
"""

from __future__ import annotations

import torch
from torch.fx import Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.ops import argument
from gradsync_fx.passes.accumulate import missing
from gradsync_fx.planning.plan import Plan


_aten = torch.ops.aten


def note_weight(draft: Draft, plan: Plan, weights: dict[int, Node]) -> None:
    """Keeps the reduced weight of the window, and whether it is one, for the passes that follow."""
    if not plan.masked:
        return
    (weight,) = weights.values()
    with draft.after(weight):
        # Sums may be reduced where they lie, with the weight beside them, and are zeroed in the end.
        told = draft.call_known(draft.form(weight.meta["val"]), _aten.clone.default, weight)
        draft.counted = (told, draft.call(_aten.gt.Scalar, weight, 0.0))


def unless_empty(draft: Draft, new: Node, old: Node) -> Node:
    """The new value where the window counted, else the old one; at the insertion point."""
    if draft.counted is None:
        return new
    form = draft.form(new.meta["val"])
    return draft.call_known(form, _aten.where.self, draft.counted[1], new, old)


def mask_boundary(draft: Draft, plan: Plan) -> None:
    """The writes and outputs of the boundary other than its updates', which inline_updates has masked."""
    if draft.counted is None:
        return
    outputs = draft.outputs()
    for write in plan.regions.boundary_writes:
        # What forward wrote into a parameter stays written: the update was given it.
        if write in plan.regions.early_writes:
            continue
        copy = draft.of[write]
        holder, value = argument(copy, 0), argument(copy, 1)
        if value.target is not _aten.where.self or value.args[2] is not holder:
            with draft.graph.inserting_before(copy):
                copy.update_arg(1, unless_empty(draft, value, holder))
    for i in plan.regions.boundary_outputs:
        value = outputs[i]
        if value.op != "placeholder" and value.target is not _aten.copy_.default:
            nothing = missing(draft, value)
            (end,) = draft.graph.find_nodes(op="output")
            with draft.graph.inserting_before(end):
                outputs[i] = unless_empty(draft, value, nothing)
    draft.set_outputs([*outputs, draft.counted[0]])
    draft.sort()
