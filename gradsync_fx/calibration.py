"""`calibrate`: measures the three numbers of this machine that the report's cost model uses."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from gradsync_fx.comm.liveness import in_job
from gradsync_fx.errors import WindowError
from gradsync_fx.inspection.costs import PRESETS, Hardware
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.wording import number_of


SIZES = (1_000, 30_000, 1_000_000, 4_000_000)  # float32 elements of a trial all-reduce
REPEATS = 5


def calibrate(
    step: OptimizedStep[..., Any],
    *args: Any,
    process_group: ProcessGroup | None = None,
    **kwargs: Any,
) -> Hardware:
    """Measures this machine for the estimate: a few all-reduces, and a few accumulate calls of `step`.

    step: from `optimize`, with no open window and k above 1; called with these arguments a few times. The window is
    discarded each time: parameters and optimizer stay as they are, counters of calls go on, buffers and random numbers
    advance. Every rank calls it. Raises `WindowError` inside a window, or where k is 1.

    Returns latency (s), bandwidth (bytes/s) and FLOP/s as reached here.

    >>> here = gradsync_fx.calibrate(step, model, optimizer, x, y)
    >>> here.flops > 0
    True
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
