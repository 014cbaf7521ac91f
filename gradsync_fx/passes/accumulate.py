"""The parts of a window that stay open: add each leaf's term to its accumulator, leave out all that lies beyond.

g -> leaf_grad -> clip -> update -> p'        becomes        acc + g -> acc'

The add stands right after the node that makes the gradient, so that the gradient dies early.
"""

from __future__ import annotations

from torch.fx import Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.ops import Role, argument
from gradsync_fx.passes.sums import accumulator, add_to_accumulator, filled
from gradsync_fx.passes.weigh import (
    gradients_of,
    reduce_all,
    running_weight,
    weights_of,
    with_this_call,
)
from gradsync_fx.planning.plan import Plan


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
        terms, weights = reduce_all(draft, plan, terms, weights, divided=False)
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
    """No write that has to wait, and NaN (0 for integers) for outputs that have to.

    What an update is given of a parameter that forward wrote stays written: `leave_parameters` put it there.
    """
    for write, sources in plan.regions.boundary_writes.items():
        if plan.is_open(sources) and write not in plan.regions.early_writes:
            draft.drop_write(draft.of[write])
    outputs = draft.outputs()
    for i, sources in plan.regions.boundary_outputs.items():
        if not plan.is_open(sources) or outputs[i].op == "placeholder":
            continue  # a tensor that the step would have changed is handed out as it is
        outputs[i] = missing(draft, outputs[i])
    draft.set_outputs(outputs)


def missing(draft: Draft, value: Node) -> Node:
    """What stands for a value that a later program gives: NaN, or 0 for integers, of its shape and dtype."""
    (end,) = draft.graph.find_nodes(op="output")
    form = value.meta["val"]
    with draft.graph.inserting_before(end):
        fill = float("nan") if form.dtype.is_floating_point else 0
        return filled(draft, fill, form, form.shape)


def give_host_values(draft: Draft, plan: Plan) -> None:
    """What the host's own calls (a scheduler's, with a metric) want becomes an output; last, where terms may not count,
    this call's weight."""
    _give(draft, plan, [index for role, index in sorted(draft.notes) if role is Role.HOST])
    if plan.weighing is not None and plan.weighing.finite:
        weight = draft.note(Role.WEIGHT)
        assert weight is not None
        draft.set_outputs([*draft.outputs(), weight])
        draft.host_values += 1


def give_late_host_values(draft: Draft, plan: Plan) -> None:
    """The same in a tail: what a micro-step could not give."""
    _give(draft, plan, list(plan.regions.boundary_host))


def _give(draft: Draft, plan: Plan, indices: list[int]) -> None:
    values = []
    for index in indices:
        (value,) = draft.notes[Role.HOST, index]
        sources = plan.regions.boundary_host.get(index)
        waits = sources is not None and plan.is_open(sources)
        values.append(missing(draft, value) if waits else value)
    draft.set_outputs(draft.outputs() + values)
    draft.host_values = len(values)
