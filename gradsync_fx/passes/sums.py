"""What every pass that touches a running sum shares: its input, the add, the cast and other forms, the reset."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.program import Kind, Slot
from gradsync_fx.planning.plan import Plan


def accumulator(draft: Draft, plan: Plan, leaf: int) -> Node:
    """The input that holds the running sum of a leaf."""
    name = plan.step.leaves[leaf].name
    return draft.input(Slot(Kind.ACCUMULATOR, name, name), plan.accumulators[name])


def cast(draft: Draft, node: Node, dtype: torch.dtype) -> Node:
    """`node` in another dtype, itself where it has that dtype already."""
    if node.meta["val"].dtype is dtype:
        return node
    form = draft.form(node.meta["val"], dtype=dtype)
    return draft.call_known(form, torch.ops.prims.convert_element_type.default, node, dtype)


def as_pairs(draft: Draft, node: Node) -> Node:
    """A complex tensor as pairs of real numbers, in a dimension more; any other as it is."""
    value = node.meta["val"]
    if not value.is_complex():
        return node
    form = draft.form(value, shape=[*value.shape, 2], dtype=value.dtype.to_real())
    return draft.call_known(form, torch.ops.aten.view_as_real.default, node)


def shaped(draft: Draft, flat: Node, like: torch.Tensor) -> Node:
    """A flat tensor in the shape of `like`; of pairs, where that is complex."""
    pairs = [*like.shape, 2] if like.is_complex() else list(like.shape)
    form = draft.form(like, shape=pairs, dtype=like.dtype.to_real())
    found = draft.call_known(form, torch.ops.aten.reshape.default, flat, pairs)
    if like.is_complex():
        form = draft.form(like, shape=like.shape)
        found = draft.call_known(form, torch.ops.aten.view_as_complex.default, found)
    return found


def add_to_accumulator(draft: Draft, plan: Plan, leaf: int, term: Node) -> Node:
    """acc + term."""
    acc = accumulator(draft, plan, leaf)
    with draft.after(term):
        form = draft.form(acc.meta["val"])
        return draft.call_known(form, torch.ops.aten.add.Tensor, acc, term)


def filled(draft: Draft, value: float, form: torch.Tensor, shape: Sequence[int] = ()) -> Node:
    """A constant in the dtype and on the device of `form`; without dimensions, unless a shape is given."""
    return draft.call_known(
        draft.form(form, shape=shape),
        torch.ops.aten.full.default,
        list(shape),
        value,
        dtype=form.dtype,
        device=form.device,
        pin_memory=False,
    )


def reset(draft: Draft, holder: Node) -> None:
    """An accumulator, or a running weight, becomes zero at the end of the program."""
    (end,) = draft.graph.find_nodes(op="output")
    form = holder.meta["val"]
    with draft.graph.inserting_before(end):
        zeros = filled(draft, 0.0, form, form.shape)
    draft.write(holder, zeros)
