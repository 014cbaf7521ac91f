"""`explain`: what would become of a step at any number of ranks, running nothing; `calibrate` for its model."""

from __future__ import annotations

import inspect
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx._torch import FakeStore
from gradsync_fx.api import OptimizedStep
from gradsync_fx.capture.meta_tensors import stand_ins
from gradsync_fx.comm.liveness import in_job
from gradsync_fx.errors import OptionError, WindowError
from gradsync_fx.inspection.costs import PRESETS, Hardware, find_hardware
from gradsync_fx.inspection.report import Report
from gradsync_fx.options import Options
from gradsync_fx.wording import number_of


SIZES = (1_000, 30_000, 1_000_000, 4_000_000)  # float32 elements of a trial all-reduce
REPEATS = 5


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
    call of the step raise, and `OptionError` for a world size below 1.
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


def calibrate(
    step: OptimizedStep, *args: Any, process_group: ProcessGroup | None = None, **kwargs: Any
) -> Hardware:
    """Measures this machine for the estimate: a few all-reduces, and a few accumulate calls of `step`.

    step: from `optimize`, with no open window and k above 1; called with these arguments a few times. The window is
    discarded each time: parameters and optimizer stay as they are, counters of calls go on, buffers and random numbers
    advance. Every rank calls it. Raises `WindowError` inside a window, or where k is 1.

    Returns latency (s), bandwidth (bytes/s) and FLOP/s as reached here.
    """
    executor = step._executor
    if step.pending or any(k == 1 for k in executor.options.steps):
        raise WindowError(
            "calibrate",
            seen=f"{number_of(step.pending, 'pending micro-step')}, k = {max(executor.options.steps)}",
            wanted="a step between two windows, with gradient_accumulation_steps above 1",
            fix="call step.flush() first, or calibrate with another k",
        )
    times = []
    for _ in range(REPEATS + 1):  # the first call compiles
        start = time.perf_counter()
        step(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        step.discard()
    found = step.report().predicted
    latency, bandwidth = _link(process_group)
    return Hardware("measured", latency, bandwidth, found.flops / statistics.median(times[1:]))


def _link(group: ProcessGroup | None) -> tuple[float, float]:
    """Latency and bandwidth from a line through the times of all-reduces: t = 2 (R - 1) (alpha + n / (R beta))."""
    _, ranks = in_job(group) or (0, 1)
    if ranks < 2:
        return PRESETS["laptop"].latency, PRESETS["laptop"].bandwidth
    cuda = "nccl" in dist.get_backend(group)
    sizes, seconds = [], []
    for count in SIZES:
        data = torch.zeros(count, device="cuda" if cuda else "cpu")
        times = []
        for _ in range(REPEATS + 1):
            dist.barrier(group)
            start = time.perf_counter()
            dist.all_reduce(data, group=group)
            if cuda:
                torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        sizes.append(float(count * 4))
        seconds.append(statistics.median(times[1:]))
    slope, intercept = statistics.linear_regression(sizes, seconds)
    hops = 2 * (ranks - 1)
    return max(intercept, 1e-6) / hops, hops / ranks / max(slope, 1e-13)
