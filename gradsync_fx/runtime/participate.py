"""How a rank without data participates in the others' accumulate calls, where those reduce (sync_each_batch)."""

from __future__ import annotations

import math

import torch

from gradsync_fx.ir.ops import ALL_REDUCE, WAIT
from gradsync_fx.planning.plan import Plan, carrier


def take_part(plan: Plan) -> None:
    """Zeros into the reductions of the other ranks' accumulate call; what they sum comes in here, too.

    In the order of the program that they run, with its scales (passes/weigh.py).
    """
    leaves = plan.step.leaves
    weights = dict(plan.weights) if plan.weighing else {}
    carriers = {carrier(plan, part): part for part in weights}
    scaled = plan.wire_dtype is torch.float16 and plan.group is not None
    totals: dict[int, float] = {}
    if scaled:
        for part, weight in weights.items():
            before = weight.clone()
            _add_reduced([weight], weight.dtype, "sum", plan.group)
            totals[part] = float(weight - before)
        weights = {}
    for bucket in plan.buckets:
        held = [plan.accumulators[leaves[i].name] for i in bucket.leaves]
        if bucket in carriers and weights:
            held.append(weights.pop(carriers[bucket]))
        reduction, scale = bucket.reduction, 1.0
        if scaled:
            count = totals.get(bucket.part, float(plan.world))
            scale = 2.0 ** math.ceil(math.log2(count)) if count > 0 else 1.0
        _add_reduced(held, plan.wire_dtype, reduction.op, reduction.group, scale)
    for weight in weights.values():
        _add_reduced([weight], weight.dtype, "sum", plan.group)


def _add_reduced(
    held: list[torch.Tensor],
    wire: torch.dtype | None,
    op: str,
    group: str | None,
    scale: float = 1.0,
) -> None:
    if group is None:
        return
    real = [torch.view_as_real(t) if t.is_complex() else t for t in held]
    sizes = [t.numel() for t in real]
    flat = torch.zeros(sum(sizes), dtype=wire or real[0].dtype, device=real[0].device)
    total = WAIT(ALL_REDUCE(flat, op, group))
    for tensor, term in zip(real, total.split(sizes), strict=True):
        tensor.add_(term.view_as(tensor).to(tensor.dtype), alpha=scale)
