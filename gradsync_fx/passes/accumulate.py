"""Accumulate program: add each leaf's gradient to its accumulator, and leave out all that lies beyond.

g -> leaf_grad -> clip -> update -> p'        becomes        acc + g -> acc'

The add stands right behind the node that makes the gradient, so that the gradient dies early.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from gradsync_fx.draft import Draft
from gradsync_fx.ops import argument
from gradsync_fx.passes.bucket import reduce_bucket
from gradsync_fx.passes.sums import accumulator, add_to_accumulator
from gradsync_fx.plan import Plan


def accumulate_gradients(draft: Draft, plan: Plan) -> None:
    """Every leaf's sum becomes a write into its accumulator. With sync_each_batch, what is added is reduced first."""
    from_buckets: dict[int, Node] = {}
    if plan.sync_each_batch:
        for bucket in plan.buckets:
            terms = [draft.of[plan.regions.gradients[leaf][0]].args[0] for leaf in bucket.leaves]
            from_buckets.update(
                zip(bucket.leaves, reduce_bucket(draft, plan, bucket, terms), strict=True)  # type: ignore[arg-type]
            )
    for leaf, (marker, *_) in plan.regions.gradients.items():
        gradient = from_buckets.get(leaf, draft.of[marker].args[0])
        assert isinstance(gradient, Node)
        total = add_to_accumulator(draft, plan, leaf, gradient)
        draft.write(accumulator(draft, plan, leaf), total)


def join_partial_sums(draft: Draft, plan: Plan) -> None:
    """A gradient that a later backward adds to is no cut: its marker goes."""
    for marker in plan.regions.partial:
        copy = draft.of[marker]
        copy.replace_all_uses_with(argument(copy, 0))


def leave_parameters(draft: Draft, plan: Plan) -> None:
    """An update returns the parameters that it was given."""
    for step_node in plan.regions.updates:
        update = draft.of[step_node]
        params = argument(update, 2)
        for item in list(update.users):
            item.replace_all_uses_with(params[argument(item, 1)])


def drop_boundary_effects(draft: Draft, plan: Plan) -> None:
    """No write of the boundary, and NaN (0 for integers) for outputs that only the boundary has."""
    for write in plan.regions.boundary_writes:
        draft.graph.erase_node(draft.of[write])
    outputs = draft.outputs()
    (end,) = draft.graph.find_nodes(op="output")
    for i in plan.regions.boundary_outputs:
        value = outputs[i].meta["val"]
        fill = float("nan") if value.dtype.is_floating_point else 0
        with draft.graph.inserting_before(end):
            outputs[i] = draft.call(
                torch.ops.aten.full.default,
                list(value.shape),
                fill,
                dtype=value.dtype,
                device=value.device,
                pin_memory=False,
            )
    draft.set_outputs(outputs)
    draft.nan_outputs = plan.regions.boundary_outputs
