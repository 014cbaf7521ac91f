"""The report of a step that runs eagerly: why it was not captured, and what that costs."""

from __future__ import annotations

import torch

from gradsync_fx.eager.step import EagerStep
from gradsync_fx.inspection.costs import Hardware, Load, predict
from gradsync_fx.inspection.data import Collective
from gradsync_fx.inspection.levels import levels_of
from gradsync_fx.inspection.remarks import of_objects
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.tensors import dtype_name, parameters, scale
from gradsync_fx.options import Options


def describe_eager(
    eager: EagerStep, options: Options, *, step: str, line: str, hardware: str | Hardware
) -> Report:
    """Collectives and bytes of a window; no graph, and so no regions, programs or estimate."""
    collectives = _collectives(eager)
    k = max(options.steps) or 1
    count, size = len(collectives), sum(c.bytes for c in collectives)
    sums = eager.sums
    held = sum(t.numel() * t.element_size() for t in sums.values())
    return Report(
        step=step,
        line=line,
        k=options.steps[0] or "manual" if len(options.steps) == 1 else k,
        world_size=eager.setting.world,
        simulated=False,
        collectives_before=k * count,
        collectives_after=count,
        bytes_before=k * size,
        bytes_after=size,
        collectives=collectives,
        levels=levels_of(eager.setting, size),
        sharing=None,
        once=None,
        kept=(),
        refusals=(f"not captured: {eager.why.culprit}: {eager.why.seen}",),
        moved=(),
        scale=scale(sums, list(sums), eager.setting.wire_dtype, options),
        warnings=(
            "the step runs eagerly: nothing is compiled, no reduction overlaps with backward or update, and a boundary "
            f"copies the {held:,} bytes of sums once more than a captured step",
            *of_objects(eager.objects),
        ),
        unused_parameters=tuple(n for n in eager.objects.parameters if n not in eager.trained),
        parameters=parameters(eager.objects, sums, eager.trained),
        regions=(),
        passes=(),
        programs=(),
        graph=(),
        predicted=predict(Load(0, 0, (), eager.setting.world), k, hardware),
        memory=None,
        code=None,
    )


def _collectives(eager: EagerStep) -> tuple[Collective, ...]:
    found: list[Collective] = []
    for number in range(len(eager.objects.optimizers)):
        names = sorted(n for n in eager.held_by(number) if n in eager.sums)
        for group, bucket in eager.buckets(names):
            if group is None:
                continue
            dtype = eager.setting.wire_dtype or eager.sums[bucket[0]].dtype
            found.append(
                Collective(
                    bucket=len(found),
                    parameters=tuple(bucket),
                    op="sum",
                    group=group.group_name,
                    ranks=eager.setting.world,
                    dtype=dtype_name(dtype),
                    bytes=_bytes(eager, bucket, dtype),
                    programs={},
                    nodes=(),
                    way="wire",
                    way_back="",
                )
            )
    return tuple(found)


def _bytes(eager: EagerStep, bucket: list[str], dtype: torch.dtype) -> int:
    return sum(eager.sums[name].numel() for name in bucket) * dtype.itemsize
