"""How a rank without data participates in the others' accumulate calls, where those reduce (sync_each_batch)."""

from __future__ import annotations

import torch

from gradsync_fx.ir.ops import ALL_REDUCE, WAIT
from gradsync_fx.planning.plan import Plan, scales_wire, sending_order, wire_scale


def take_part(plan: Plan) -> None:
    """Zeros into the reductions of the other ranks' accumulate call; what they sum comes in here, too.

    In the order of the program that they run, with its scales (planning/plan.py).
    """
    leaves = plan.step.leaves
    weights = plan.weights if plan.weighing else {}
    scaled = scales_wire(plan)
    totals: dict[int, float] = {}
    for sent in sending_order(plan, plan.buckets, weights, scaled=scaled):
        bucket, part = sent.bucket, sent.weight
        held = [] if part is None else [weights[part]]
        if bucket is not None:
            reduction, scale = bucket.reduction, 1.0
            held = [*(plan.accumulators[leaves[i].name] for i in bucket.leaves), *held]
            if scaled:
                scale = wire_scale(totals.get(bucket.part, float(plan.world)))
            _add_reduced(held, plan.wire_dtype, reduction.op, reduction.group, scale)
        elif part is not None:
            before = weights[part].clone()
            _add_reduced(held, weights[part].dtype, "sum", plan.group)
            totals[part] = float(weights[part] - before)


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
