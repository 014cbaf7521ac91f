"""`gradsync-fx plan`: which micro-batch and k fit into a memory, and what each costs."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from gradsync_fx._torch import tree_leaves, tree_map_only
from gradsync_fx.cli.factory import Made, Request, Tell, made, told
from gradsync_fx.cli.problems import REFUSED, USAGE, Problem
from gradsync_fx.errors import GradSyncError
from gradsync_fx.explanation import captured
from gradsync_fx.inspection.capacity import Choice, Measure, Measures, best, choices, measure
from gradsync_fx.inspection.text import binary, seconds_text
from gradsync_fx.options import Options
from gradsync_fx.wording import number_of


TAKES = "micro_batch"  # a parameter of the factory, where it has one
UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is planned for. memory: bytes of one rank. global_batch: samples of a window on all ranks."""

    memory: int
    global_batch: int

    @classmethod
    def of(cls, memory: str, global_batch: int, world_size: int) -> Wanted:
        """Parses `24GB`, `80GiB` or a number of bytes. Raises `Problem`."""
        found = re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)\s*([KMG]I?B)?", memory.strip().upper())
        size = int(float(found[1]) * UNITS[found[2] or ""]) if found else 0
        if not size:
            wanted = (
                "a size above 0, such as 24GB (1e9 bytes each), 80GiB (2**30), or a number of bytes"
            )
            raise Problem(USAGE, "--memory", repr(memory), wanted, "pass one")
        if global_batch % world_size:
            raise Problem(
                USAGE,
                "--global-batch",
                f"{global_batch} samples for {number_of(world_size, 'rank')}",
                "as many samples for each rank",
                f"pass a multiple of {world_size}",
            )
        return cls(size, global_batch)


def make_plan(request: Request, wanted: Wanted, tell: Tell) -> tuple[Choice, ...]:
    """Captures the step with two micro-batches, and tells all others from these. Raises `Problem`."""
    with made(request.target, tell) as call:
        first = call()
        own = _micro_batch(request, first)
        small = max(2, own)  # torch makes a special case of 1

        def measured(*, shard: bool) -> Measures:
            def at(size: int) -> Measure:
                how = ", its update shared out" if shard else ""
                tell(f"capturing a micro-batch of {size}{how}")
                step, args, kwargs = _resized(call, first, own, size)
                return _measured(request, step, args, kwargs, size, shard=shard)

            return at(small), at(2 * small)

        ranks, sharded = request.world_size or 1, None
        both = measured(shard=False)
        if ranks > 1 and not request.options.get("shard_optimizer"):
            try:
                sharded = measured(shard=True)
            except Problem as problem:  # an update that cannot be shared out has no such column
                if not isinstance(problem.__cause__, GradSyncError):
                    raise
        samples = wanted.global_batch // ranks
        with told(request.target, first[0]):
            return choices(both, sharded, samples, wanted.memory, request.hardware)


def _measured(
    request: Request, step: Any, args: Any, kwargs: Any, size: int, *, shard: bool
) -> Measure:
    given = {**request.options, "gradient_accumulation_steps": 2}
    options = Options.of(given | ({"shard_optimizer": True} if shard else {}))
    ranks = request.world_size or 1
    with told(request.target, step), captured(step, args, kwargs, options, ranks) as found:
        closing = [c for c in found._executor.catalogue.captures if c.updates]
        if closing:
            return measure(closing[-1], size)
    raise Problem(
        REFUSED,
        str(request.target),
        "the step is not captured with an update: it has no graph to tell its memory from",
        "a step that reaches optimizer.step() and is compiled",
        "see why: gradsync-fx inspect",
    )


def _micro_batch(request: Request, made_first: tuple[Any, Any, Any]) -> int:
    """Of what the factory returned: the first size of its first tensor."""
    _, args, kwargs = made_first
    tensors = [v for v in tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor) and v.dim()]
    if not tensors or not tensors[0].shape[0]:
        raise Problem(
            USAGE,
            str(request.target),
            "its arguments have no tensor with samples",
            "a batch among the step's arguments",
            f"have the factory return one, and take {TAKES}, the number of samples in it",
        )
    return int(tensors[0].shape[0])


def _resized(call: Made, first: tuple[Any, Any, Any], own: int, size: int) -> tuple[Any, Any, Any]:
    """The factory's step with a batch of this size: made by it, or its own samples again and again."""
    if call.takes(TAKES):
        return call(**{TAKES: size})
    step, args, kwargs = first

    def resize(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.dim() or tensor.shape[0] != own:
            return tensor
        return torch.cat([tensor] * -(-size // own))[:size]

    args, kwargs = tree_map_only(torch.Tensor, resize, (args, kwargs))
    return step, args, kwargs


def to_table(found: tuple[Choice, ...], wanted: Wanted, request: Request) -> RenderableType:
    """For a `rich` console; the best row is marked."""
    chosen = best(found)
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for name in (
        "",
        "micro-batch",
        "k",
        "held",
        "temporary",
        "peak",
        "of memory",
        "peak, sharded",
        "window",
        "samples/s",
    ):
        table.add_column(name, justify="right" if name else "left")
    for choice in found:
        table.add_row(
            "->" if choice is chosen else "",
            str(choice.micro_batch),
            str(choice.k),
            binary(choice.held),
            binary(choice.temporaries),
            binary(choice.peak),
            f"{100 * choice.peak / wanted.memory:.0f} %",
            "-" if choice.sharded is None else binary(choice.sharded),
            seconds_text(choice.window),
            f"{choice.rate:,.0f}",
            style="bold" if choice is chosen else "" if choice.fits else "dim",
        )
    ranks = number_of(request.world_size or 1, "rank")
    head = f"{wanted.global_batch} samples per update on {ranks}, {binary(wanted.memory)} each, {request.hardware.name}"
    if chosen is None:
        held = binary(found[0].held)
        tail = f"none fits: {held} are held whatever the micro-batch is"
    else:
        tail = f"-> micro-batch {chosen.micro_batch}, gradient_accumulation_steps={chosen.k}"
    note = "estimated; a device's context and its allocator's rounding come on top"
    return Group(
        Text(head, style="bold"), Text(""), table, Text(""), Text(tail), Text(note, style="dim")
    )


def as_data(found: tuple[Choice, ...], wanted: Wanted, request: Request) -> dict[str, Any]:
    """For JSON: sizes in bytes, times in seconds."""
    chosen = best(found)
    rows = [{**asdict(c), "peak": c.peak, "best": c is chosen} for c in found]
    return {
        "memory": wanted.memory,
        "global_batch": wanted.global_batch,
        "world_size": request.world_size or 1,
        "hardware": asdict(request.hardware),
        "choices": rows,
    }
