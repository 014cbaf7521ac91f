"""`explain`: the report of a step for any number of ranks, without running it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch.distributed as dist

from gradsync_fx._torch import FakeStore
from gradsync_fx.capture.meta_tensors import stand_ins
from gradsync_fx.comm.liveness import in_job
from gradsync_fx.errors import OptionError
from gradsync_fx.inspection.costs import Hardware, find_hardware
from gradsync_fx.inspection.report import Report
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options


def explain(
    train_step: Callable[..., Any],
    *args: Any,
    world_size: int | None = None,
    hardware: str | Hardware = "laptop",
    **kwargs: Any,
) -> Report:
    """The report of a step that is captured with these arguments, and not run.

    Keyword arguments that `optimize` knows are options of it, all others go to the step. world_size: ranks to plan for;
    more than the job has are simulated, without a launch. hardware: a preset's name, or a `Hardware`, for the estimate.
    Parameters and data may lie on the meta device: nothing is allocated then. Raises what `optimize` and the first
    call of the step raise, and `OptionError` for a world size below 1. Sizes in the report are in bytes, times in
    seconds.

    >>> report = gradsync_fx.explain(
    ...     train_step, model, optimizer, x, y, gradient_accumulation_steps=4, world_size=8
    ... )
    >>> report.collectives_before, report.collectives_after
    (4, 1)
    """
    find_hardware(hardware)
    if world_size is not None and (isinstance(world_size, bool) or world_size < 1):
        raise OptionError(
            "argument 'world_size'",
            seen=repr(world_size),
            wanted="a number of ranks, at least 1",
            fix="leave it out for the ranks of this job",
        )
    known = {f.name for f in fields(Options)}
    options = Options.of({name: v for name, v in kwargs.items() if name in known})
    rest = {name: v for name, v in kwargs.items() if name not in known}
    plain = inspect.unwrap(train_step) if isinstance(train_step, OptimizedStep) else train_step
    _, here = in_job(options.process_group) or (0, 1)
    ranks = world_size or here
    with _ranks_at_hand(ranks), stand_ins(plain, args, rest) as (given, named):
        step = OptimizedStep(plain, options, simulated=ranks)
        step.capture(*given, **named)
        return step.report(hardware)


@contextmanager
def _ranks_at_hand(ranks: int) -> Iterator[None]:
    """A default group of that size, of torch's fake kind, where the job has none: for collectives in the step."""
    if ranks < 2 or not dist.is_available() or dist.is_initialized():
        yield
        return
    hook = sys.excepthook  # torch puts its own in front, for the ranks of a real job
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
