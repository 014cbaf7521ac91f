"""The parts of a window that stay open: add each leaf's term to its accumulator, leave out all that lies beyond.

g -> leaf_grad -> clip -> update -> p'        becomes        acc + g -> acc'

The add stands right behind the node that makes the gradient, so that the gradient dies early.
"""

from __future__ import annotations

from gradsync_fx.draft import Draft
from gradsync_fx.ops import Role, argument
from gradsync_fx.passes.sums import accumulator, add_to_accumulator, filled
from gradsync_fx.passes.weigh import (
    gradients_of,
    reduce_all,
    running_weight,
    weights_of,
    with_this_call,
)
from gradsync_fx.plan import Plan


def join_partial_sums(draft: Draft, plan: Plan) -> None:
    """A gradient that a later backward adds to is no cut: its marker goes."""
    for marker in plan.regions.partial:
        copy = draft.of[marker]
        copy.replace_all_uses_with(argument(copy, 0))


def accumulate_gradients(draft: Draft, plan: Plan) -> None:
    """Every leaf's sum becomes a write into its accumulator. With sync_each_batch, what is added is reduced first."""
    terms = gradients_of(draft, plan, plan.open_buckets())
    weights = weights_of(draft, plan, [b.part for b in terms])
    if plan.sync_each_batch and terms:
        terms, weights = reduce_all(draft, plan, terms, weights)
    for bucket, values in terms.items():
        for leaf, value in zip(bucket.leaves, values, strict=True):
            total = add_to_accumulator(draft, plan, leaf, value)
            draft.write(accumulator(draft, plan, leaf), total)
    for part, weight in weights.items():
        held = running_weight(draft, plan, part)
        draft.write(held, with_this_call(draft, plan, part, weight))


def leave_parameters(draft: Draft, plan: Plan) -> None:
    """An update that has to wait returns the parameters that it was given."""
    for step_node in plan.regions.updates:
        if not plan.is_open([step_node]):
            continue
        update = draft.of[step_node]
        params = argument(update, 2)
        for item in list(update.users):
            item.replace_all_uses_with(params[argument(item, 1)])


def drop_boundary_effects(draft: Draft, plan: Plan) -> None:
    """No write that has to wait, and NaN (0 for integers) for outputs that have to."""
    for write, sources in plan.regions.boundary_writes.items():
        if plan.is_open(sources):
            draft.drop_write(draft.of[write])
    outputs = draft.outputs()
    (end,) = draft.graph.find_nodes(op="output")
    for i, sources in plan.regions.boundary_outputs.items():
        if not plan.is_open(sources) or outputs[i].op == "placeholder":
            continue  # a tensor that the step would have changed is handed out as it is
        value = outputs[i].meta["val"]
        fill = float("nan") if value.dtype.is_floating_point else 0
        with draft.graph.inserting_before(end):
            outputs[i] = filled(draft, fill, value, value.shape)
    draft.set_outputs(outputs)


def give_host_values(draft: Draft, plan: Plan) -> None:
    """What the host's own calls (a scheduler's, with a metric) want joins the outputs."""
    wanted = [draft.notes[key][0] for key in sorted(draft.notes) if key[0] is Role.HOST]
    draft.set_outputs(draft.outputs() + wanted)
    draft.host_values = len(wanted)
