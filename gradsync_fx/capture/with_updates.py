"""Which Python numbers of a step reach only what happens once per update, by the finished graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.capture.counts import FollowedNumber
from gradsync_fx.capture.source_names import users_name
from gradsync_fx.capture.trace_state import Number
from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import downstream
from gradsync_fx.ir.program import Step, output_values, writes
from gradsync_fx.ir.regions import Regions, find_regions


def followed(
    step: Step,
    numbers: Sequence[Number],
    sources: Sequence[str],
    function: Callable[..., Any] | None,
) -> tuple[FollowedNumber, ...]:
    """What becomes of each number. sources: Dynamo's names of the step's inputs. function: the user's
    step."""
    if not numbers:
        return ()
    regions = find_regions(step)
    holders = dict(zip(sources, step.module.graph.find_nodes(op="placeholder"), strict=True))
    return tuple(
        FollowedNumber(
            users_name(n.source, function),
            n.line,
            n.branched or (n.source in holders and _with_update(step, regions, holders[n.source])),
            n.settable,
        )
        for n in numbers
    )


def _with_update(step: Step, regions: Regions, holder: Node) -> bool:
    """Whether all effects that this number reaches are updates, or are written or returned with updates."""
    fed = downstream([holder])
    late = {*regions.updates, *regions.boundary_writes}
    results = output_values(step.module)
    late |= {results[i] for i in regions.boundary_outputs}
    effects = {
        *writes(step.module),
        *regions.updates,
        *step.module.graph.find_nodes(op="call_function", target=ops.LEAF_GRAD),
        *regions.collectives,
        *(n for n in results if isinstance(n, Node) and _is_tensor(n) and n.target is not ops.NOTE),
    }
    reached = fed & effects
    return bool(reached) and reached <= late


def _is_tensor(node: Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)
