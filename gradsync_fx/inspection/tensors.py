"""The parts of a report on parameters and on the arithmetic of their gradients; sizes and dtypes as text."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from gradsync_fx.inspection.data import Parameter, Scale
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.options import Options


FORMULAS = {
    "mean": "all-reduce(sum of g) / (micro-steps summed on all ranks)",
    "sum": "all-reduce(sum of g) / ranks",
    "weighted": "all-reduce(sum of w g) / all-reduce(sum of w)",
}


def scale(
    sums: Mapping[str, torch.Tensor],
    names: Collection[str],
    wire: torch.dtype | None,
    options: Options,
    *,
    shares: bool = False,
) -> Scale:
    """What the window's sums are divided by, and their dtypes on the way. shares: each rank gets its pieces alone."""
    formula = FORMULAS[options.reduction]
    if shares and not options.sync_each_batch:
        formula = formula.replace("all-reduce(sum of g)", "reduce-scatter(sum of g)")
        formula = formula.replace("all-reduce(sum of w g)", "reduce-scatter(sum of w g)")
    accumulators = tuple(dict.fromkeys(dtype_name(sums[n].dtype) for n in names if n in sums))
    return Scale(
        reduction=options.reduction,
        formula=formula,
        accumulator_dtypes=accumulators,
        wire_dtypes=(dtype_name(wire),) if wire is not None else accumulators,
    )


def parameters(
    objects: Any, sums: Mapping[str, torch.Tensor], trained: Collection[str]
) -> tuple[Parameter, ...]:
    """Each parameter of the step's modules. objects: a `Capture`, or the `Objects` of an eager step."""
    owner = {id(p): type(o).__name__ for o in objects.optimizers for p in parameters_of(o)}
    return tuple(
        Parameter(
            name=name,
            shape=sizes(p.shape),
            dtype=dtype_name(p.dtype),
            bytes=size_in_bytes(p),
            trained=name in trained,
            accumulator_dtype=dtype_name(sums[name].dtype) if name in sums else "",
            optimizer=owner.get(id(p), ""),
        )
        for name, p in objects.parameters.items()
    )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sizes(shape: Any) -> tuple[int, ...]:
    """Sizes; a symbol by its hint."""
    return tuple(
        int(s) if isinstance(s, int) else int(getattr(s.node, "hint", 0) or 0) for s in shape
    )


def size_in_bytes(tensor: torch.Tensor) -> int:
    count = 1
    for size in sizes(tensor.shape):
        count *= size
    return count * tensor.element_size()
