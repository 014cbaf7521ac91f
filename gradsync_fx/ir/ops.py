"""The op vocabulary: three marker ops that capture leaves in a graph, and predicates over ATen nodes.

leaf_grad(g, i)                  -> g            the running gradient of leaf i; the window's sum is spliced in here
update(h, which, params, grads, given)           one `optimizer.step()`: replaced by the traced update, or dropped, or a
                                 -> new params   program is cut there. given: the arguments of `step`, as text
note(chain, value, role, i)      -> chain        points out a value to the passes; a chain of notes ends in an output

They have a fake kernel only, so tracing cannot look into them; they never run, as slicing removes every one.
"""

from __future__ import annotations

import operator
from enum import IntEnum
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.user_lines import NOWHERE, lines_in, users_among


_LIBRARY = torch.library.Library("gradsync_fx", "DEF")
_LIBRARY.define("leaf_grad(Tensor g, int leaf) -> Tensor")
_LIBRARY.define(
    "update(int handle, int[] which, Tensor[] params, Tensor[] grads, str given) -> Tensor[]"
)
_LIBRARY.define("note(Tensor chain, Tensor value, int role, int index) -> Tensor")


@torch.library.register_fake("gradsync_fx::leaf_grad", lib=_LIBRARY)
def _leaf_grad_fake(g: torch.Tensor, leaf: int) -> torch.Tensor:
    return torch.empty_like(g)


@torch.library.register_fake("gradsync_fx::update", lib=_LIBRARY)
def _update_fake(
    handle: int,
    which: list[int],
    params: list[torch.Tensor],
    grads: list[torch.Tensor],
    given: str,
) -> list[torch.Tensor]:
    return [torch.empty_like(p) for p in params]


@torch.library.register_fake("gradsync_fx::note", lib=_LIBRARY)
def _note_fake(chain: torch.Tensor, value: torch.Tensor, role: int, index: int) -> torch.Tensor:
    return torch.empty_like(chain)


class Role(IntEnum):
    """What a note points out.

    WEIGHT: the micro-batch's weight. LOSS: what backward was called on. LEFT: the gradient of leaf `index` when the
    step ended. HOST: argument `index` of the calls that the host makes after an update.
    """

    WEIGHT = 0
    LOSS = 1
    LEFT = 2
    HOST = 3


LEAF_GRAD = torch.ops.gradsync_fx.leaf_grad.default
UPDATE = torch.ops.gradsync_fx.update.default
NOTE = torch.ops.gradsync_fx.note.default
ALL_REDUCE = torch.ops._c10d_functional.all_reduce.default
ALL_REDUCE_IN_PLACE = torch.ops._c10d_functional.all_reduce_.default
ALL_TO_ALL = torch.ops._c10d_functional.all_to_all_single.default
ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
WAIT = torch.ops._c10d_functional.wait_tensor.default
ITEM = torch.ops.aten._local_scalar_dense.default

_aten = torch.ops.aten
_REDUCTIONS = frozenset(
    {
        ALL_REDUCE,
        torch.ops._c10d_functional.all_reduce_coalesced.default,
        torch.ops._c10d_functional.reduce_scatter_tensor.default,
    }
)
# Ops that are linear in their first tensor argument (or list): a sum may be taken before or after them.
_LINEAR = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.clone.default,
        _aten.cat.default,
        _aten.t.default,
        _aten.permute.default,
        _aten.transpose.int,
        _aten.squeeze.default,
        _aten.unsqueeze.default,
        _aten.slice.Tensor,
        _aten.as_strided.default,
        _aten._to_copy.default,
        _aten.constant_pad_nd.default,
        torch.ops.prims.convert_element_type.default,
    }
)
_SCALING = frozenset({_aten.mul.Tensor, _aten.div.Tensor, _aten.mul.Scalar, _aten.div.Scalar})


def argument(node: Node, index: int) -> Any:
    """A positional argument of a node, typed as Any: torch's own type is a union of everything."""
    return node.args[index]


def is_collective(node: Node) -> bool:
    """A functional collective (its wait not included)."""
    return node.op == "call_function" and (
        getattr(node.target, "namespace", "") == "_c10d_functional" and node.target is not WAIT
    )


def is_reduction(node: Node) -> bool:
    """A collective that sums or averages tensors over ranks."""
    return node.target in _REDUCTIONS


def is_linear(node: Node) -> bool:
    """Linear in its tensor inputs: data movement, casts, products with a number, sums."""
    if node.target in _LINEAR or node.target is operator.getitem:
        return True
    if node.target in _SCALING:
        return not isinstance(node.args[1], Node)
    return node.target is _aten.add.Tensor


def node_line(node: Node) -> str:
    """`file:line` of the user's code that a node stands for, as far as torch recorded it."""
    return users_among(lines_in(node.meta.get("stack_trace") or "")) or NOWHERE
