"""Checks that a step can be deferred to the end of a window: refuses reads of reduced gradients, by line."""

from __future__ import annotations

from torch.fx import Node

from gradsync_fx.errors import CaptureError, ReadBeforeBoundaryError
from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import Nearest, upstream
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Step
from gradsync_fx.ir.regions import Regions


def check_deferrable(step: Step, regions: Regions) -> None:
    """Raises `ReadBeforeBoundaryError` where a window of more than one micro-step would change what the step means.

    That is where a gradient, or another write of the micro-step, depends on a reduced gradient other than through an
    optimizer's update.
    """
    cuts = [m for markers in regions.gradients.values() for m in markers]
    # Paths through an update do not count: what they carry is made of the next window's parameters.
    nearest = Nearest(step.module.graph, [*cuts, *regions.updates])
    for markers in regions.gradients.values():
        for marker in markers:
            found = nearest.of_inputs(marker)
            for cut in cuts if found else ():
                if cut in found:
                    _refuse(step, cut, upstream([marker], without=regions.updates))
        if len(markers) > 1:
            _refuse(step, markers[0], set(markers[0].users))


def _refuse(step: Step, cut: Node, inside: set[Node]) -> None:
    reader = next((u for u in cut.users if u in inside), next(iter(cut.users)))
    name = step.leaves[int(argument(cut, 1))].name
    raise ReadBeforeBoundaryError(
        f"synced gradient of {name!r}",
        seen=f"it is read at {ops.node_line(reader)} by {reader.name} ({reader.target}) before the boundary",
        wanted="gradients that are read only by the update when gradient_accumulation_steps > 1",
        fix="use gradient_accumulation_steps=1 for this step, or read the gradient after the last backward",
    )


def check_weights(step: Step, regions: Regions) -> None:
    """Raises `CaptureError` where a weight is no single number, or is not known before the gradients are used.

    That is where the weight, a loss or a gradient depends on an update of the same call: whether the micro-step counts
    would be known only after an update that had to know it.
    """
    cuts = [m for markers in regions.gradients.values() for m in markers]
    nearest = Nearest(step.module.graph, [*cuts, *regions.updates])
    notes = step.module.graph.find_nodes(op="call_function", target=ops.NOTE)
    weights = [argument(n, 1) for n in notes if argument(n, 2) == ops.Role.WEIGHT]
    for weight in weights:
        if weight.meta["val"].numel() != 1:
            raise CaptureError(
                f"micro_batch_weight, at {ops.node_line(weight)}",
                seen=f"a weight of shape {tuple(weight.meta['val'].shape)}",
                wanted="a number, or a tensor of one element",
                fix="sum it up: micro_batch_weight(mask.sum())",
            )
    losses = [argument(n, 1) for n in notes if argument(n, 2) == ops.Role.LOSS]
    for value in [*weights, *losses, *(argument(m, 0) for m in cuts)]:
        if nearest.of(value):
            raise CaptureError(
                f"weights of micro-steps, at {ops.node_line(value)}",
                seen="a weight, a loss or a gradient that depends on an update or a reduced gradient of the same call",
                wanted="one update, after all losses of the step",
                fix='make a step of each part, or leave out skip_nonfinite and reduction="weighted"',
            )
