"""Terms: ops of terms and constants, as values that two programs can be compared by. Equal terms are one object.

The rewrites of the lowering are the only equations that they know; what they do not know is different.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch

from gradsync_fx.ir import ops
from gradsync_fx.passes.device_numbers import COMMUTATIVE, OF_TENSORS, ON_NUMBERS
from gradsync_fx.passes.fuse import SCALED


_aten = torch.ops.aten
CAST = torch.ops.prims.convert_element_type.default
OWN_PIECE = "own piece"  # of a sum of which each rank has its elements alone, and from where to where they lie
_SAME = (_aten.scalar_tensor.default, CAST)  # they change no number, or round it


@dataclass(frozen=True, slots=True, eq=False)
class Term:
    """An op of terms and constants; equal ones are one object (`Terms`)."""

    op: Any
    args: tuple[Any, ...]

    def __str__(self) -> str:
        return self.text(3)

    def text(self, depth: int) -> str:
        """With what stands that deep, and no deeper."""
        name = getattr(self.op, "__name__", str(self.op)).removesuffix(".default")
        if not depth:
            return f"{name}(...)"
        return f"{name}({', '.join(_text(a, depth - 1) for a in self.args)})"


def where_they_differ(one: Any, other: Any) -> tuple[Any, Any]:
    """The innermost parts of two terms that are the first to differ."""
    while True:
        args = [x.args if isinstance(x, Term) else x for x in (one, other)]
        if isinstance(one, Term) != isinstance(other, Term) or not all(
            isinstance(a, tuple) for a in args
        ):
            return one, other
        if isinstance(one, Term) and one.op is not other.op or len(args[0]) != len(args[1]):
            return one, other
        pair = next((p for p in zip(*args, strict=True) if p[0] != p[1]), None)
        if pair is None:
            return one, other
        one, other = pair


def _text(value: Any, depth: int) -> str:
    if isinstance(value, Term):
        return value.text(depth)
    if isinstance(value, tuple) and any(isinstance(v, Term) for v in value):
        return f"[{', '.join(_text(v, depth) for v in value)}]"
    return str(value[1]) if isinstance(value, tuple) and len(value) == 2 else str(value)


class Terms:
    """All terms of a comparison. on_device: numbers are tensors there, by the equations of device_numbers.py."""

    def __init__(self, *, on_device: bool = False) -> None:
        self._known: dict[tuple[Any, ...], Term] = {}
        self._on_device, self._numbers = on_device, set[Term]()

    def number(self, term: Term) -> Term:
        """Says that a term is one number, in float64."""
        self._numbers.add(term)
        return term

    def make(self, op: Any, *args: Any) -> Term:
        """The term itself, without equations."""
        key = (op, args)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = Term(op, args)
        return found

    def _of_numbers(self, op: Any, args: tuple[Any, ...]) -> Term | None:
        """What is computed of numbers, by Python or on the device; None for anything else.

        A number is rounded wherever it meets a tensor: one of Python's by the op that takes it.
        """
        if op in COMMUTATIVE and _is_constant(args[0]):
            args = args[::-1]
        first = args[0] if args else None
        if not isinstance(first, Term):
            return None
        if op is _aten.select.int and first.op == "numbers":
            return first.args[_value(args[2])]
        if op in (ops.ITEM, *_SAME) and first in self._numbers:
            return first
        if op is ops.ITEM:
            return self.number(self.make("number", first))
        widened = op is CAST and _value(args[1]) is torch.float64
        if widened and first.op is _aten.reshape.default and _value(first.args[1]) == ():
            return self.number(self.make("number", first.args[0]))
        if op in ON_NUMBERS and all(a in self._numbers or _is_constant(a) for a in args):
            held = [a if isinstance(a, Term) else constant(float(_value(a))) for a in args]
            return self.number(self.make(ON_NUMBERS[op], *held))
        if op in OF_TENSORS and len(args) == 2 and args[1] in self._numbers:
            return self.make(OF_TENSORS[op], *args)
        return None

    def of(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Term:
        """The term of a call, by the equations that the rewrites of the lowering rest on."""
        number = self._of_numbers(op, args) if self._on_device else None
        if number is not None:
            return number
        if op in (ops.ITEM, _aten.clone.default):  # a number of a tensor, or the tensor; a copy
            return args[0]
        if op is operator.getitem and args[0].op is _aten._foreach_norm.Scalar:
            many, order = args[0].args[0], args[0].args[1:]
            if all(_value(o) in (2, 2.0) for o in order):
                one = many[_value(args[1])]
                square = self.make(_aten.mul.Tensor, one, one)
                return self.make(_aten.sqrt.default, self.make(_aten.sum.default, square))
        if op is CAST and args[0].op is _aten.lt.Tensor and args[0].args[0] is args[0].args[1]:
            return self.make(_aten.full.default, (), (float, 0.0))
        if op is _aten.permute.default and _value(args[1]) == (1, 0):
            if args[0].op is op and args[0].args[1] == args[1]:
                return args[0].args[0]
            if args[0].op is CAST:
                turned_first = self.of(op, (args[0].args[0], args[1]), {})
                return self.make(CAST, turned_first, *args[0].args[1:])
            if args[0].op is _aten.mm.default:
                a, b = args[0].args
                turned = [self.of(op, (factor, args[1]), {}) for factor in (b, a)]
                return self.make(_aten.mm.default, *turned)
        if args and isinstance(args[0], Term) and args[0].op is OWN_PIECE:
            if op is _aten.view.default and _value(args[1]) == (-1,):
                return args[0]
            if op is _aten.slice.Tensor and args[1:] == args[0].args[1:]:
                return args[0].args[0]
        if op in SCALED and len(kwargs) == 1 and isinstance(next(iter(kwargs.values())), Term):
            total, product = SCALED[op]
            first, *factors = args
            term = self.make(product, *factors) if product else factors[0]
            scaled = self.make(_aten.mul.Tensor, term, next(iter(kwargs.values())))
            return self.make(total, first, scaled)
        return self.make(op, *args, *sorted(kwargs.items()))


def _value(constant: Any) -> Any:
    """What `_constant` was made of."""
    if isinstance(constant, tuple) and len(constant) == 2 and isinstance(constant[0], type):
        return constant[1]
    return tuple(map(_value, constant)) if isinstance(constant, tuple) else constant


def _is_constant(value: Any) -> bool:
    return not isinstance(value, Term) and isinstance(_value(value), int | float)


def constant(value: Any) -> Any:
    """Hashable, and equal only to its like: 1, 1.0 and True are not the same argument."""
    if isinstance(value, float):
        return (float, value if value == value else "nan")
    if isinstance(value, slice | torch.SymInt | torch.SymFloat | torch.SymBool):
        return (type(value), str(value))
    try:
        hash(value)
    except TypeError:
        return (type(value), id(value))
    return (type(value), value)
