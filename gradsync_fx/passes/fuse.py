"""What a compiler needs to see to move little memory: norms as sums, and sums written where they are made.

foreach_norm([a, b], 2)[i]   ->   sqrt(sum(a * a))    part of the loop that makes the values; the op for many tensors is
                                                      opaque, and reads values that were stored for it
copy_(acc, acc + g), last    ->   the same, right after the sum: the gradient's memory is free for the next one
copy_(acc, acc + mm(a, b))   ->   add_product(acc, a, b): the product adds itself to the sum, and is never stored. On a
                                  GPU one of bfloat16 or float16 goes into a float32 sum, without being rounded first

And what it would round:

add(a, b, alpha=item(t))     ->   add(a, mul(b, t)), for a number t in float64
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.dataflow import downstream
from gradsync_fx.ir.memory import aliased
from gradsync_fx.ir.ops import ITEM, argument
from gradsync_fx.passes.rewritten import Rewritten


_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
_HALF = (torch.bfloat16, torch.float16)
# Ops of two tensors that take a number for the second one, too.
_OF_TENSORS = (_aten.add.Tensor, _aten.sub.Tensor, _aten.mul.Tensor, _aten.div.Tensor)
# Those with a factor (alpha, value) before their second term: what adds it, and what makes it of two others.
SCALED: dict[Any, tuple[Any, Any]] = {
    _aten.add.Tensor: (_aten.add.Tensor, None),
    _aten.sub.Tensor: (_aten.sub.Tensor, None),
    _aten.addcmul.default: (_aten.add.Tensor, _aten.mul.Tensor),
    _aten.addcdiv.default: (_aten.add.Tensor, _aten.div.Tensor),
}
_LIBRARY = torch.library.Library("gradsync_fx", "FRAGMENT")
_LIBRARY.define("add_product(Tensor(a!) total, Tensor a, Tensor b) -> ()")
# Below, on a CPU, the product's time is the call's.
_WORTH_IT = 2**14


def _add_product(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    torch.addmm(total, a, b, out=total)


def _add_product_on_gpu(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """One call of cuBLAS, with beta 1: a result that is the first argument is not copied first."""
    if total.dtype is a.dtype:
        _add_product(total, a, b)
    else:  # terms of half the width are multiplied as such, and added up as the sum is
        _aten.addmm.dtype_out(total, a, b, total.dtype, out=total)


@torch.library.register_fake("gradsync_fx::add_product", lib=_LIBRARY)
def _add_product_fake(total: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """Nothing is made."""


_LIBRARY.impl("add_product", _add_product, "CompositeExplicitAutograd")
_LIBRARY.impl("add_product", _add_product_on_gpu, "CUDA")
ADD_PRODUCT = torch.ops.gradsync_fx.add_product.default


def norms_as_sums(rewritten: Rewritten) -> None:
    """Two-norms of many tensors at once, each spelt out. Another order of summation than eager's."""
    graph, fake_mode = rewritten.main.graph, rewritten.fake_mode
    for many in graph.find_nodes(op="call_function", target=_aten._foreach_norm.Scalar):
        if list(many.args[1:]) not in ([], [2], [2.0]) or many.kwargs:
            continue
        for item in list(many.users):
            if item.target is not operator.getitem:
                continue
            value = argument(many, 0)[argument(item, 1)]
            with graph.inserting_before(item):
                square = emit(graph, fake_mode, _aten.mul.Tensor, (value, value), {})
                total = emit(graph, fake_mode, _aten.sum.default, (square,), {})
                norm = emit(graph, fake_mode, _aten.sqrt.default, (total,), {})
            item.replace_all_uses_with(norm)
            graph.erase_node(item)
        if not many.users:
            graph.erase_node(many)


def numbers_as_tensors(rewritten: Rewritten) -> None:
    """Numbers read of a float64 tensor stay tensors where they meet float64 values: Inductor's kernels take float."""
    _take_tensors(rewritten.main, rewritten.fake_mode)
    for kernel, module in rewritten.updates.items():
        _take_tensors(module, kernel.fake_mode)


def _take_tensors(module: GraphModule, fake_mode: Any) -> None:
    graph = module.graph
    for item in graph.find_nodes(op="call_function", target=ITEM):
        holder = argument(item, 0)
        if holder.meta["val"].dtype is not torch.float64 or holder.meta["val"].dim():
            continue
        for user in list(item.users):
            value = user.meta.get("val")
            if isinstance(value, torch.Tensor) and value.dtype is torch.float64:
                _take_tensor(module, fake_mode, user, item, holder)
        if not item.users:
            graph.erase_node(item)


def _take_tensor(
    module: GraphModule, fake_mode: Any, user: Node, number: Node, tensor: Node
) -> None:
    graph = module.graph
    if user.target in SCALED and list(user.kwargs.values()) == [number]:
        total, product = SCALED[user.target]
        first, *factors = user.args
        with graph.inserting_before(user):
            term = emit(graph, fake_mode, product, tuple(factors), {}) if product else factors[0]
            term = emit(graph, fake_mode, _aten.mul.Tensor, (term, tensor), {})
            value = emit(graph, fake_mode, total, (first, term), {})
        user.replace_all_uses_with(value)
        graph.erase_node(user)
    elif user.target in _OF_TENSORS and not user.kwargs and argument(user, 1) is number:
        user.update_arg(1, tensor)


def resets(module: GraphModule) -> dict[Node, Node]:
    """The inputs that end as zero, each with the write of that."""
    copies = module.graph.find_nodes(op="call_function", target=_aten.copy_.default)
    return {argument(c, 0): c for c in copies if _is_zeros(argument(c, 1)) and not c.users}


def _is_zeros(node: Any) -> bool:
    return isinstance(node, Node) and node.target is _aten.full.default and argument(node, 1) == 0


def write_early(rewritten: Rewritten) -> None:
    """Moves each write into an input right after what it writes, where nobody reads the input as it was after that."""
    graph = rewritten.main.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        onto, source = argument(copy, 0), argument(copy, 1)
        if not isinstance(source, Node) or source.op != "call_function" or copy.users:
            continue
        if onto.op == "placeholder" and all(
            order[u] <= order[source] for u in _readers(onto, copy)
        ):
            source.append(copy)


def _readers(tensor: Node, writer: Node) -> list[Node]:
    """Who reads a tensor, by itself, as a view, or as a copy: Inductor takes copies out that it holds for idle."""

    def hands_on(node: Node) -> bool:
        return node.target is _aten.clone.default or aliased(node.target) is not None

    seen = downstream([tensor], without=(writer,), through=hands_on)
    return [user for node in seen for user in node.users if user is not writer]


def add_products(rewritten: Rewritten) -> None:
    """Gradients that are a product of matrices go into their sums without a tensor of their own."""
    graph, fake_mode = rewritten.main.graph, rewritten.fake_mode
    order = {node: i for i, node in enumerate(graph.nodes)}
    for copy in graph.find_nodes(op="call_function", target=_aten.copy_.default):
        total, source = argument(copy, 0), argument(copy, 1)
        factors = _product(total, source)
        if factors is None or copy.users or set(source.users) != {copy}:
            continue
        others = [order[u] for u in total.users if u is not copy and u is not source]
        if any(order[source] < place < order[copy] for place in others):
            continue
        with graph.inserting_before(source):
            a, b = (
                emit(graph, fake_mode, _aten.permute.default, (factor, [1, 0]), {})
                if turned
                else factor
                for factor, turned in factors
            )
            emit(graph, fake_mode, ADD_PRODUCT, (total, a, b), {})
        unread = [copy, source]
        while unread[-1].target is not _aten.mm.default:
            unread.append(argument(unread[-1], 1 if unread[-1] is source else 0))
        for node in unread:
            graph.erase_node(node)


def _product(total: Node, source: Any) -> list[tuple[Node, bool]] | None:
    """The factors of a product that `source` adds to `total`, each with whether it has to be transposed."""
    if not isinstance(source, Node) or source.target is not _aten.add.Tensor:
        return None
    if total.op != "placeholder" or source.args[0] is not total or source.kwargs:
        return None
    form = total.meta["val"]
    product, turned = argument(source, 1), False
    while isinstance(product, Node) and product.target in (_aten.permute.default, _CAST):
        if len(product.users) > 1:
            return None
        turned ^= product.target is _aten.permute.default
        product = argument(product, 0)
    if not isinstance(product, Node) or product.target is not _aten.mm.default:
        return None
    if not _may_add(form, product.meta["val"]) or len(product.users) > 1:
        return None
    if not all(type(n) is int for n in form.shape):
        return None
    if form.device.type == "cpu" and form.numel() < _WORTH_IT:
        return None
    a, b = argument(product, 0), argument(product, 1)
    return [(b, True), (a, True)] if turned else [(a, False), (b, False)]


def _may_add(total: torch.Tensor, product: torch.Tensor) -> bool:
    """Whether there is a kernel that adds a product of this dtype to such a sum."""
    if total.device.type == "cuda" and total.dtype is torch.float32 and product.dtype in _HALF:
        return True
    return total.device.type in ("cpu", "cuda") and total.dtype is product.dtype
