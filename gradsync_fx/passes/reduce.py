"""Boundary and tail: the window's gradient in place of each marker.

boundary   acc + g  \
tail       acc       } -> cat of the bucket -> all_reduce -> wait -> / divisor -> what clipping and the update read

R(sum_i g_i) / D once, where D counts the terms of all ranks; synchronising each micro-step computes
sum_i R(g_i / k) / ranks. Equal in exact arithmetic, not bitwise. A bucket's all-reduce starts behind its last add.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from gradsync_fx.draft import Draft
from gradsync_fx.ops import argument
from gradsync_fx.passes.bucket import reduce_bucket
from gradsync_fx.passes.sums import accumulator, add_to_accumulator, cast
from gradsync_fx.plan import Bucket, Plan
from gradsync_fx.program import Kind, Slot


_aten = torch.ops.aten


def _divide(draft: Draft, bucket: Bucket, values: list[Node]) -> list[Node]:
    form = torch.empty((), dtype=torch.float64)
    holder = draft.input(
        Slot(
            Kind.SCALAR,
            f"divisor ({bucket.reduction.divisor})",
            ("divisor", bucket.reduction.divisor),
        ),
        form,
    )
    divided = []
    for value in values:
        with draft.after(value):
            divided.append(draft.call(_aten.div.Tensor, value, holder))
    return divided


def _install(
    draft: Draft, plan: Plan, bucket: Bucket, values: list[Node], occurrence: int = 0
) -> None:
    for leaf, value in zip(bucket.leaves, values, strict=True):
        marker = draft.of[plan.regions.gradients[leaf][occurrence]]
        hand = plan.regions.hand.get(leaf)
        old = marker if hand is None else draft.of[hand.wait]
        with draft.after(value):
            gradient = cast(draft, value, old.meta["val"].dtype)
        readers = [u for u in old.users if u is not gradient]
        for reader in readers:
            reader.replace_input_with(old, gradient)


def reduce_window(draft: Draft, plan: Plan) -> None:
    """Boundary program: this micro-step's gradient joins the window's sum, which is reduced and handed on."""
    for bucket in plan.buckets:
        gradients = [draft.of[plan.regions.gradients[leaf][0]].args[0] for leaf in bucket.leaves]
        if plan.sync_each_batch:
            terms = reduce_bucket(draft, plan, bucket, gradients)  # type: ignore[arg-type]
            sums = [
                add_to_accumulator(draft, plan, leaf, t)
                for leaf, t in zip(bucket.leaves, terms, strict=True)
            ]
        else:
            totals = [
                add_to_accumulator(draft, plan, leaf, g)  # type: ignore[arg-type]
                for leaf, g in zip(bucket.leaves, gradients, strict=True)
            ]
            sums = reduce_bucket(draft, plan, bucket, totals)
        _install(draft, plan, bucket, _divide(draft, bucket, sums))
        _reduce_later_gradients(draft, plan, bucket)


def _reduce_later_gradients(draft: Draft, plan: Plan, bucket: Bucket) -> None:
    """Gradients that are zeroed and computed again in one step (windows of one micro-step only): each by itself."""
    markers = plan.regions.gradients
    for occurrence in range(1, max(len(markers[leaf]) for leaf in bucket.leaves)):
        again = tuple(leaf for leaf in bucket.leaves if len(markers[leaf]) > occurrence)
        part = Bucket(again, bucket.reduction)
        gradients = [argument(draft.of[markers[leaf][occurrence]], 0) for leaf in again]
        reduced = reduce_bucket(draft, plan, part, gradients)
        _install(draft, plan, part, _divide(draft, part, reduced), occurrence)


def reduce_sums(draft: Draft, plan: Plan) -> None:
    """Tail program: the sums as they are, reduced unless every micro-step was."""
    for bucket in plan.buckets:
        sums = [accumulator(draft, plan, leaf) for leaf in bucket.leaves]
        if not plan.sync_each_batch:
            sums = reduce_bucket(draft, plan, bucket, sums)
        _install(draft, plan, bucket, _divide(draft, bucket, sums))


def reset_accumulators(draft: Draft, plan: Plan) -> None:
    """The window is over: every accumulator becomes zero."""
    (end,) = draft.graph.find_nodes(op="output")
    for leaf in plan.regions.leaves:
        acc = accumulator(draft, plan, leaf)
        with draft.graph.inserting_before(end):
            form = acc.meta["val"]
            zeros = draft.call(
                _aten.full.default,
                list(form.shape),
                0.0,
                dtype=form.dtype,
                device=form.device,
                pin_memory=False,
            )
        draft.write(acc, zeros)


def forget_micro_step(draft: Draft, plan: Plan) -> None:
    """Tail program: no outputs, and only the writes of the boundary."""
    for write in list(draft.graph.find_nodes(op="call_function", target=_aten.copy_.default)):
        if write not in {draft.of[w] for w in plan.regions.boundary_writes}:
            draft.graph.erase_node(write)
    draft.set_outputs([])
