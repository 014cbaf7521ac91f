"""Queries of a loss's autograd graph before its backward: the leaves that it reaches, and divisions of the loss."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradsync_fx._torch import saved_factor, summed_sizes


# Nodes between a loss and the per-sample losses that a division may stand in front of.
_THROUGH = (
    "MeanBackward", "SumBackward", "ToCopyBackward", "CloneBackward", "AliasBackward", "ViewBackward",
    "ReshapeAliasBackward", "SqueezeBackward", "UnsqueezeBackward",
)  # fmt: skip


def reached(roots: list[Tensor]) -> dict[int, Tensor]:
    """The leaves that a backward from these tensors gives a gradient, by id."""
    found: dict[int, Tensor] = {}
    stack: list[Any] = [t.grad_fn for t in roots if t.grad_fn is not None]
    met = set(stack)
    while stack:
        node = stack.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        fresh = {n for n, _ in node.next_functions if n is not None} - met
        met |= fresh
        stack += fresh
    return found


@dataclass(frozen=True, slots=True)
class Division:
    """A number that a loss is divided by. factor: written as a multiplication by its inverse."""

    number: float
    factor: bool


def divisions(loss: Tensor) -> tuple[Division, ...]:
    """What a loss is divided by on its way to backward, outermost first.

    A sum divided by its own number of elements is a mean, no division. Of the terms of a sum (`loss / k + penalty / k`)
    the one with most divisions counts.
    """
    return _below(loss.grad_fn, 64)


def _below(node: Any, depth: int) -> tuple[Division, ...]:
    if node is None or not depth:
        return ()
    name = node.name()
    inner = [n for n, _ in node.next_functions if n is not None]
    if name.startswith(("DivBackward", "MulBackward")):
        number, factor = _number(node), name.startswith("Mul")
        if number is None or len(inner) != 1:
            return ()
        if factor:
            number = 1 / number
        own = () if _is_mean(inner[0], number) else (Division(number, factor),)
        return own + _below(inner[0], depth - 1)
    if name.startswith("AddBackward"):
        return max((_below(n, depth - 1) for n in inner), key=len, default=())
    if name.startswith(_THROUGH) and len(inner) == 1:
        return _below(inner[0], depth - 1)
    return ()


def _number(node: Any) -> float | None:
    other = saved_factor(node)
    if not isinstance(other, Tensor) or other.numel() != 1 or other.requires_grad:
        return None
    value = float(other)
    return value if math.isfinite(value) and value else None


def _is_mean(node: Any, number: float) -> bool:
    if not node.name().startswith("SumBackward"):
        return False
    sizes = summed_sizes(node)
    return number in (math.prod(sizes), *sizes)


def norm(gradient: Tensor) -> float:
    """Of this rank's part of a gradient, in float32 or more, without sending anything."""
    local = getattr(gradient, "to_local", None)
    values = gradient.detach() if local is None else local().detach()
    if values.is_sparse:
        values = values.coalesce().values()
    values = values.to(torch.promote_types(values.dtype, torch.float32))
    return float(torch.linalg.vector_norm(values))
