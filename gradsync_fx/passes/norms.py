"""Norms of running sums on a GPU: one op for those of a bucket, where Inductor would make a kernel for each.

n = foreach_norm([s0 / d, s1 / d, s2 / d], 2)
stack([n[0], n[1], n[2]])                        ->   abs(cat([norms([s0, s1], 2), norms([s2], 2)]) / d)

torch's own op for many tensors takes few launches for all of them, and those of one bucket are read while others are on
their way. It would read values that were stored for it; so it is given the sums, and what these are scaled by is done
to the norms: a norm of c * s is that of s times |c|. That is rounded in other places, and squares of sums overflow as
much earlier as the sums are larger; the order of summation is that of torch's kernel, which is eager's on a GPU.
"""

from __future__ import annotations

import operator
from itertools import groupby
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.memory import viewed
from gradsync_fx.ir.ops import argument
from gradsync_fx.passes.rewritten import Rewritten


_aten = torch.ops.aten
# Of the op below on a device: norms of parts, of tensors, and the vector.
_LAUNCHES = 3
_SCALING = (_aten.mul.Tensor, _aten.div.Tensor)
_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define("norms(Tensor[] tensors, Scalar order) -> Tensor")


def _norms(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    return torch.stack(_aten._foreach_norm.Scalar(tensors, order))


@torch.library.register_fake("gradsync_fx::norms", lib=_LIBRARY)
def _norms_fake(tensors: list[torch.Tensor], order: float) -> torch.Tensor:
    return tensors[0].new_empty(len(tensors))


_LIBRARY.impl("norms", _norms, "CompositeExplicitAutograd")
NORMS = torch.ops.gradsync_fx.norms.default


def norms_of_sums(rewritten: Rewritten) -> None:
    """Where norms are stacked, of tensors that lie somewhere, scaled alike: nothing has to be stored for them."""
    graph, fake_mode = rewritten.main.graph, rewritten.fake_mode
    waits = graph.find_nodes(op="call_function", target=WAIT_SUMS)
    bucket = {total: wait for wait in waits for total in argument(wait, 0)}
    for many in graph.find_nodes(op="call_function", target=_aten._foreach_norm.Scalar):
        values, order = argument(many, 0), many.args[1] if len(many.args) > 1 else 2.0
        stack = _stack(many, len(values))
        form = values[0].meta["val"]
        if stack is None or form.device.type != "cuda" or form.is_complex() or many.kwargs:
            continue
        if not isinstance(order, int | float) or order == 0:  # that counts what is not zero
            continue
        scaled = [_scaling(value) for value in values]
        tensors, (steps, *others) = [base for base, _ in scaled], [s for _, s in scaled]
        if any(s != steps for s in others) or not all(_lies(base) for base in tensors):
            continue
        runs = [[*run] for _, run in groupby(tensors, key=bucket.get)]
        if len(tensors) <= _LAUNCHES * len(runs):
            runs = [tensors]
        if len(tensors) <= _LAUNCHES:
            continue
        with graph.inserting_before(stack):
            rows = [emit(graph, fake_mode, NORMS, (run, order), {}) for run in runs]
            norms = emit(graph, fake_mode, _aten.cat.default, (rows,), {}) if rows[1:] else rows[0]
            for op, factor in steps:
                norms = emit(graph, fake_mode, op, (norms, factor), {})
            norms = emit(graph, fake_mode, _aten.abs.default, (norms,), {})
        stack.replace_all_uses_with(norms)
        unread = [stack, *argument(stack, 0)]
        for node in [*unread, *many.users, many]:
            graph.erase_node(node)


def _stack(many: Node, count: int) -> Node | None:
    """What puts all norms into one vector, in their order, where nothing else reads them."""
    stacks = {
        user
        for item in many.users
        for row in item.users
        for user in (row.users if row.target is _aten.unsqueeze.default else [row])
    }
    stack = stacks.pop() if len(stacks) == 1 else None
    if stack is None or stack.target is not _aten.cat.default or len(stack.args) > 1:
        return None
    rows = argument(stack, 0)
    if any(r.target is not _aten.unsqueeze.default or len(r.users) > 1 for r in rows):
        return None
    items = [argument(row, 0) for row in rows]
    if any(i.target is not operator.getitem or len(i.users) > 1 for i in items):
        return None
    found = [(argument(item, 0), argument(item, 1)) for item in items]
    return stack if found == [(many, i) for i in range(count)] else None


def _scaling(value: Node) -> tuple[Node, list[tuple[Any, Any]]]:
    """The tensor that a value is made of, and the ops with numbers that make it."""
    steps: list[tuple[Any, Any]] = []
    while value.target in _SCALING and _is_number(value.args[1]) and not value.kwargs:
        steps.insert(0, (value.target, value.args[1]))
        value = argument(value, 0)
    return value, steps


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or isinstance(value, Node) and not value.meta["val"].dim()


def _lies(value: Node) -> bool:
    """Whether it is in memory anyway: an input, or what was reduced, or a view of these."""
    while value.op == "call_function" and viewed(value.target) == 0:
        value = argument(value, 0)
    return value.op == "placeholder" or value.target is ops.WAIT


def scales_norms(node: Node) -> bool:
    """Whether it is the end of what `norms_of_sums` writes."""
    if node.target is not _aten.abs.default:
        return False
    base, _ = _scaling(argument(node, 0))
    rows = argument(base, 0) if base.target is _aten.cat.default else [base]
    return all(row.target is NORMS for row in rows)


def stacked(terms: Any, scaled: Any) -> Any:
    """The term of that, as of norms of scaled tensors that are stacked. terms: of symbolic.py."""
    values, order = _scaled(terms, scaled)
    many = terms.make(_aten._foreach_norm.Scalar, values, order)
    zero = (int, 0)
    items = [terms.of(operator.getitem, (many, (int, i)), {}) for i in range(len(values))]
    rows = tuple(terms.of(_aten.unsqueeze.default, (item, zero), {}) for item in items)
    return terms.of(_aten.cat.default, (rows,), {})


def _scaled(terms: Any, term: Any) -> tuple[tuple[Any, ...], Any]:
    if term.op is NORMS:
        return term.args
    if term.op is _aten.cat.default:
        rows = [_scaled(terms, row) for row in term.args[0]]
        return tuple(value for values, _ in rows for value in values), rows[0][1]
    values, order = _scaled(terms, term.args[0])
    return tuple(terms.of(term.op, (v, *term.args[1:]), {}) for v in values), order
