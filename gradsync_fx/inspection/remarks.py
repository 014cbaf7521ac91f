"""The warnings of a report: what in the step is probably a mistake, or has no effect."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.ir import ops
from gradsync_fx.ir.ops import Role, argument
from gradsync_fx.options import Options
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.protocol import StepObjects


_THROUGH = (
    torch.ops.aten.alias.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.view.default,
    torch.ops.aten.clone.default,
)


def remarks(captures: Sequence[CapturedStep], options: Options) -> tuple[str, ...]:
    """All warnings, each once."""
    found = (text for captured in captures for text in _of(captured, options))
    return tuple(dict.fromkeys(found))


def _of(captured: CapturedStep, options: Options) -> Iterator[str]:
    yield from _nothing_removed(captured, options)
    yield from _nothing_shared_out(captured, options)
    yield from _unsynchronised(captured)
    yield from _divided_twice(captured, options)
    yield from _no_sync(captured)
    yield from (str(b.opaque) for b in captured.programs.bindings.values() if b.opaque is not None)
    yield from of_objects(captured.facts.capture)


def mistakes(captures: Sequence[CapturedStep], options: Options) -> tuple[str, ...]:
    """What a step written for plain accumulation still does that changes its numbers here, or has no effect."""
    found = (text for c in captures for text in (*_divided_twice(c, options), *_no_sync(c)))
    return tuple(dict.fromkeys(found))


def of_objects(objects: StepObjects) -> Iterator[str]:
    """What the user's modules say, however the step runs."""
    yield from _batch_norm(objects)
    yield from _flags_of_ddp(objects)


def _nothing_removed(captured: CapturedStep, options: Options) -> Iterator[str]:
    grouped = any(b.reduction.group is not None for b in captured.facts.buckets)
    k, world = max(options.steps), captured.facts.setting.world
    if world > 1 and options.accumulates and captured.updates:
        if options.sync_each_batch:
            yield (
                f"0 gradient collectives removed although world size is {world} and k is {k or 'manual'}: "
                "sync_each_batch=True reduces in every micro-step"
            )
        elif not grouped and not captured.facts.regions.hand_flat:
            yield f"0 gradient collectives removed although world size is {world} and k is {k or 'manual'}"


def _nothing_shared_out(captured: CapturedStep, options: Options) -> Iterator[str]:
    if options.shard_optimizer and not captured.facts.shares:
        yield "shard_optimizer=True has no effect on one rank: it keeps all of the state, and makes the whole update"


def _unsynchronised(captured: CapturedStep) -> Iterator[str]:
    if captured.facts.setting.world < 2:
        return
    alone = [
        captured.facts.capture.step.leaves[leaf].name
        for bucket in captured.facts.buckets
        if bucket.reduction.group is None
        for leaf in bucket.leaves
        if leaf not in captured.facts.regions.hand_flat
    ]
    if alone:
        yield (
            f"parameters without gradient synchronisation: {', '.join(alone)} "
            f"(used in step, world size {captured.facts.setting.world})"
        )


def _divided_twice(captured: CapturedStep, options: Options) -> Iterator[str]:
    if options.reduction == "sum":
        return
    for note in captured.facts.capture.step.module.graph.find_nodes(
        op="call_function", target=ops.NOTE
    ):
        if argument(note, 2) != Role.LOSS:
            continue
        for node, number in _divisions(argument(note, 1)):
            if number > 1 and (number in options.steps or options.manual):
                yield (
                    f"the loss is divided by {number:g} at {ops.node_line(node)}, and the window's sum again by its "
                    f'micro-steps (reduction="{options.reduction}"): leave the division out, or pass reduction="sum"'
                )


def _divisions(value: Node) -> list[tuple[Node, float]]:
    """Numbers that a loss is divided by on its way to backward; of the terms of a sum, of the one with most.

    A sum divided by the number of its elements, or of its terms, is a mean.
    """
    aten = torch.ops.aten
    found: list[tuple[Node, float]] = []
    while value.op == "call_function":
        if value.target in (aten.div.Tensor, aten.mul.Tensor):
            source, number = argument(value, 0), argument(value, 1)
            if isinstance(number, Node) or not number:
                return found
            factor = float(number) if value.target is aten.div.Tensor else 1 / float(number)
            factor = float(round(factor)) if math.isclose(factor, round(factor)) else factor
            if not _is_mean(source, factor):
                found.append((value, factor))
            value = source
        elif value.target in _THROUGH:
            value = argument(value, 0)
        elif value.target is aten.add.Tensor:
            terms = [argument(value, i) for i in (0, 1)]
            below = [_divisions(term) for term in terms if isinstance(term, Node)]
            return found + max(below, key=len, default=[])
        else:
            return found
    return found


def _is_mean(source: Node, number: float) -> bool:
    """Whether a number is that of what was added up: elements, rows, or terms."""
    aten = torch.ops.aten
    sizes: list[Any] = []
    while source.target in (*_THROUGH, aten.sum.default, aten.sum.dim_IntList):
        summed, through = argument(source, 0), source.target in _THROUGH
        if not through:
            sizes += [summed.meta["val"].numel(), *summed.meta["val"].shape]
        source = summed
    return number in sizes or number == _terms(source) > 1


def _terms(value: Any) -> int:
    """How many tensors a chain of additions adds up."""
    if not (isinstance(value, Node) and value.target is torch.ops.aten.add.Tensor):
        return int(isinstance(value, Node))
    return sum(_terms(argument(value, i)) for i in (0, 1))


def _no_sync(captured: CapturedStep) -> Iterator[str]:
    for line, forwards in captured.facts.capture.no_syncs:
        if forwards:
            yield f"no_sync entered at {line} has no effect here: windows are gradsync_fx's; leave it out"
        else:
            yield (
                f"no_sync entered at {line} around `backward` only: DDP decides in forward, so that in eager every "
                "micro-step reduces; here it has no effect: leave it out"
            )


def _batch_norm(objects: StepObjects) -> Iterator[str]:
    if not objects.batch_norms:
        return
    names = ", ".join(objects.batch_norms)
    yield (
        f"BatchNorm in training mode ({names}): its statistics are of micro-batches, so the result is that of eager "
        "accumulation, not of one large batch"
    )


def _flags_of_ddp(objects: StepObjects) -> Iterator[str]:
    for ddp in objects.ddp:
        for flag in ("static_graph", "find_unused_parameters"):
            if getattr(ddp, flag, False):
                yield f"DistributedDataParallel({flag}=True) is not used: its reducer never runs"
