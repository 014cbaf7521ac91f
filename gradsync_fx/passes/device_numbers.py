"""For a GPU: the numbers of a call come as one vector on the device, and no kernel is given a number of Python's.

mul(p, item(lr)), lr on the host     ->   mul(p, to(select(numbers, 0, i)))
max(eps, item(norm(p)) / n) * lr     ->   the same on tensors of one element: the host would wait for the norm

A CUDA graph replays the Python numbers that it was recorded with: a learning rate among them would stay as it was for
ever. And the host would read, and copy, each number by itself. Arithmetic on numbers is in float64 there as here; where
a number meets a tensor it is rounded to the dtype that eager computes in.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node, map_arg

from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.ops import ITEM, argument
from gradsync_fx.ir.program import Kind
from gradsync_fx.passes.fuse import SCALED
from gradsync_fx.passes.rewritten import Rewritten


_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
# Arithmetic of Python on numbers, and the op that does it on tensors.
ARITHMETIC: dict[Any, Any] = {
    operator.add: _aten.add.Tensor,
    operator.sub: _aten.sub.Tensor,
    operator.mul: _aten.mul.Tensor,
    operator.truediv: _aten.div.Tensor,
    operator.pow: _aten.pow.Tensor_Tensor,
    operator.neg: _aten.neg.default,
    torch.sym_max: _aten.maximum.default,
    torch.sym_min: _aten.minimum.default,
}
# The same of a number and a constant, where that is another op.
OF_CONSTANTS: dict[Any, Any] = {
    operator.pow: _aten.pow.Tensor_Scalar,
    torch.sym_max: _aten.clamp_min.default,
    torch.sym_min: _aten.clamp_max.default,
}
COMMUTATIVE = (operator.add, operator.mul, torch.sym_max, torch.sym_min)
# Ops of a tensor and a number, and those of two tensors that do the same.
OF_TENSORS: dict[Any, Any] = {
    _aten.add.Tensor: _aten.add.Tensor,
    _aten.sub.Tensor: _aten.sub.Tensor,
    _aten.mul.Tensor: _aten.mul.Tensor,
    _aten.div.Tensor: _aten.div.Tensor,
    _aten.pow.Tensor_Scalar: _aten.pow.Tensor_Tensor,
    _aten.clamp_min.default: _aten.maximum.default,
    _aten.clamp_max.default: _aten.minimum.default,
    _aten.eq.Scalar: _aten.eq.Tensor,
    _aten.ne.Scalar: _aten.ne.Tensor,
    _aten.lt.Scalar: _aten.lt.Tensor,
    _aten.le.Scalar: _aten.le.Tensor,
    _aten.gt.Scalar: _aten.gt.Tensor,
    _aten.ge.Scalar: _aten.ge.Tensor,
}
# Dtypes of numbers that come from the host: each of their values is one of float64.
_EXACT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def numbers_on_device(rewritten: Rewritten) -> None:
    """Nothing, for a program on the CPU."""
    device = accelerator_of(rewritten.program.inputs())
    if device is None:
        return
    graph, fake_mode = rewritten.main.graph, rewritten.fake_mode
    holders = graph.find_nodes(op="placeholder")
    slots = rewritten.program.slots
    found = [
        (position, holder)
        for position, (holder, slot) in enumerate(zip(holders, slots, strict=True))
        if slot.kind in (Kind.SCALAR, Kind.DATA) and _is_number(holder) and _may_move(holder)
    ]
    moved = {}
    if found:
        with graph.inserting_after(holders[-1]):
            vector = graph.placeholder("numbers")
        with fake_mode:
            vector.meta["val"] = torch.empty(len(found), dtype=torch.float64, device=device)
        with graph.inserting_before(vector.next):
            for i, (_, holder) in enumerate(found):
                moved[holder] = emit(graph, fake_mode, _aten.select.int, (vector, 0, i), {})
    _Mover(rewritten, moved).run()
    for holder in moved:
        if holder.users:
            raise AssertionError(f"{holder.name} is still read by {list(holder.users)}")
        graph.erase_node(holder)
    rewritten.numbers = tuple(position for position, _ in found)


def accelerator_of(values: list[Any]) -> torch.device | None:
    """The device of a program that is not the CPU; None for one of the CPU."""
    devices = (v.device for v in values if isinstance(v, torch.Tensor))
    return next((d for d in devices if d.type not in ("cpu", "meta")), None)


def host_numbers(rewritten: Rewritten) -> list[str]:
    """The floats that a program for a device still reads on the host: by the node that reads each."""
    return [
        node.name
        for node in rewritten.main.graph.nodes
        if isinstance(node.meta.get("val"), float | torch.SymFloat) and node.users
    ]


def _is_number(holder: Node) -> bool:
    value = holder.meta["val"]
    return (
        isinstance(value, torch.Tensor)
        and value.device.type == "cpu"
        and value.dim() == 0
        and value.dtype in _EXACT
    )


def _may_move(holder: Node) -> bool:
    """Whether whatever reads it runs on the device, or reads it as a number for what does."""
    return bool(holder.users) and all(
        _moves(user) if user.target is ITEM else _is_on_device(user) for user in holder.users
    )


def _moves(number: Node) -> bool:
    """Whether all that is made of a number can be made on the device."""
    return all(
        _moves(user) if _is_arithmetic(user) else _takes(user, number) for user in number.users
    )


def _is_arithmetic(node: Node) -> bool:
    if node.target not in ARITHMETIC or isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return isinstance(node.args[0], Node) or node.target in COMMUTATIVE


def _is_on_device(node: Node) -> bool:
    value = node.meta.get("val")
    return (
        node.op == "call_function"
        and isinstance(value, torch.Tensor)
        and value.device.type != "cpu"
    )


def _takes(user: Node, number: Node) -> bool:
    """Whether a tensor may stand for the number in this op."""
    if not _is_on_device(user):
        return False
    if user.target is _aten.scalar_tensor.default:
        return True
    if user.target in SCALED and user.kwargs:
        return list(user.kwargs.values()) == [number] and number not in user.args
    return (
        user.target in OF_TENSORS
        and not user.kwargs
        and argument(user, 1) is number
        and argument(user, 0) is not number
    )


class _Mover:
    """Goes through the graph once. of: the tensor on the device for each number, and each tensor of the host."""

    def __init__(self, rewritten: Rewritten, moved: dict[Node, Node]) -> None:
        self._graph, self._fake_mode = rewritten.main.graph, rewritten.fake_mode
        self._of = dict(moved)
        self._rounded: dict[tuple[Node, torch.dtype], Node] = {}

    def run(self) -> None:
        numbers = []
        for node in list(self._graph.nodes):
            if node.target is ITEM and self._reads_device(node) and _moves(node):
                self._of[node] = self._as_number(node)
                numbers.append(node)
            elif any(n in self._of for n in node.all_input_nodes) and node.op == "call_function":
                if _is_arithmetic(node):
                    self._compute(node)
                    numbers.append(node)
                else:
                    self._replace(node)
        for node in reversed(numbers):
            if node.users:
                raise AssertionError(f"{node.name} is still read by {list(node.users)}")
            self._graph.erase_node(node)

    def _reads_device(self, item: Node) -> bool:
        holder = argument(item, 0)
        value = holder.meta["val"]
        return holder in self._of or (value.device.type != "cpu" and value.is_floating_point())

    def _as_number(self, item: Node) -> Node:
        holder = argument(item, 0)
        if holder in self._of:
            return self._of[holder]
        with self._graph.inserting_before(item):
            scalar = emit(self._graph, self._fake_mode, _aten.reshape.default, (holder, []), {})
            return self._emit(_cast, scalar, torch.float64)

    def _compute(self, node: Node) -> None:
        given: Any = node.args
        args = [self._of.get(a, a) if isinstance(a, Node) else float(a) for a in given]
        if not isinstance(args[0], Node):
            args.reverse()
        known = ARITHMETIC if all(isinstance(a, Node) for a in args) else OF_CONSTANTS
        target = known.get(node.target, ARITHMETIC[node.target])
        with self._graph.inserting_before(node):
            self._of[node] = self._emit(target, *args)

    def _replace(self, node: Node) -> None:
        """An op on the device that reads a number, or a tensor of one element that was on the host."""
        value = node.meta["val"]
        with self._graph.inserting_before(node):
            if node.target is _aten.scalar_tensor.default:
                new = self._round(self._of[argument(node, 0)], value.dtype)
            elif node.target in SCALED and node.kwargs:
                new = self._scaled(node)
            else:
                args = map_arg(node.args, lambda n: self._operand(n, node))
                target = node.target
                if any(isinstance(a, Node) and a.target in (ITEM, *ARITHMETIC) for a in node.args):
                    target = OF_TENSORS.get(target, target)
                new = self._emit(target, *args, **node.kwargs)
        form = new.meta["val"]
        if (form.dtype, form.shape, form.device) != (value.dtype, value.shape, value.device):
            raise AssertionError(f"{node.name} was {value}, and is {form}")
        new.meta.update({k: v for k, v in node.meta.items() if k not in new.meta})
        node.replace_all_uses_with(new)
        self._graph.erase_node(node)

    def _scaled(self, node: Node) -> Node:
        total, product = SCALED[node.target]
        first, *factors = node.args
        (number,) = node.kwargs.values()
        term = self._emit(product, *factors) if product else factors[0]
        factor = self._round(self._of[number], _math_dtype(node.meta["val"].dtype))  # type: ignore[index]
        return self._emit(total, first, self._emit(_aten.mul.Tensor, term, factor))

    def _operand(self, value: Node, node: Node) -> Node:
        if value not in self._of:
            return value
        others = [a.meta["val"].dtype for a in node.args if isinstance(a, Node) and a is not value]
        held = value.meta["val"]
        if isinstance(held, torch.Tensor) and node.target not in OF_TENSORS:
            return self._round(self._of[value], held.dtype)  # a copy, a view: as it was on the host
        dtype = others[0] if others and others[0].is_floating_point else torch.float64
        return self._round(self._of[value], _math_dtype(dtype))

    def _round(self, number: Node, dtype: torch.dtype) -> Node:
        """As the dtype in which the op computes has it."""
        if number.meta["val"].dtype is dtype:
            return number
        key = number, dtype
        if key not in self._rounded:
            with self._graph.inserting_after(number):
                self._rounded[key] = self._emit(_cast, number, dtype)
        return self._rounded[key]

    def _emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(self._graph, self._fake_mode, target, args, kwargs)


def _math_dtype(dtype: torch.dtype) -> torch.dtype:
    """What torch's kernels compute in, for values of a dtype."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else dtype
