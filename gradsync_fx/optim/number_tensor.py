"""A number in a tensor's clothes: what an optimizer's step counter is while its update is traced."""

from __future__ import annotations

import operator
from typing import Any

import torch


def is_counter(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.dim() == 0
        and value.device.type == "cpu"
        and not value.is_complex()
        and value.dtype is not torch.bool
    )


class Counter:
    """Stands in for a one-element CPU state tensor: changes in place like a tensor, computes like a number."""

    device = torch.device("cpu")
    is_cpu, is_cuda, requires_grad = True, False, False
    # torch's optimizers insist on tensors for their counters.
    __class__ = property(lambda self: torch.Tensor)

    def __init__(self, value: Any) -> None:
        self.value = value

    @classmethod
    def __torch_function__(cls, function: Any, *rest: Any) -> Any:
        """torch's C code takes the class for a tensor's, and would read a tensor's memory."""
        raise TypeError(f"a counter is given to {function}")

    def __neg__(self) -> Any:
        return -self.value

    def item(self) -> Any:
        return self.value

    def add_(self, other: Any, *, alpha: Any = 1) -> Counter:
        self.value = self.value + _number(other) * alpha
        return self

    def mul_(self, other: Any) -> Counter:
        self.value = self.value * _number(other)
        return self

    def copy_(self, other: Any) -> Counter:
        self.value = _number(other)
        return self

    fill_ = copy_
    __iadd__, __imul__ = add_, mul_


def plain(value: Any) -> Any:
    return value.value if type(value) is Counter else value


def _number(value: Any) -> Any:
    """Raises `TypeError` for a tensor: what is summed with one (a scalar parameter's momentum) counts nothing."""
    kind: type = type(value)  # a counter calls itself a tensor
    if kind is not Counter and isinstance(value, torch.Tensor):
        raise TypeError("a counter meets a tensor")
    return plain(value)


def _forward(name: str) -> Any:
    compute = getattr(operator, name)
    return lambda self, other: compute(self.value, plain(other))


def _reflected(name: str) -> Any:
    compute = getattr(operator, name)
    return lambda self, other: compute(plain(other), self.value)


for _name in ("add", "sub", "mul", "truediv", "pow"):
    setattr(Counter, f"__{_name}__", _forward(_name))
    setattr(Counter, f"__r{_name}__", _reflected(_name))
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    setattr(Counter, f"__{_name}__", _forward(_name))
