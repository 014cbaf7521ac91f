"""`optimize`: from a training step to an `OptimizedStep`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, ParamSpec, TypeVar, get_overloads, overload

import torch
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from gradsync_fx.choices import Broadcasts, ReductionKind
from gradsync_fx.errors import OptionError
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import (
    Backend,
    Commit,
    OnUpdate,
    Optimization,
    Options,
    Steps,
    Unsupported,
)


P = ParamSpec("P")
R = TypeVar("R")


@overload
def optimize(
    train_step: Callable[P, R],
    *,
    gradient_accumulation_steps: Steps = 1,
    reduction: ReductionKind = "mean",
    process_group: ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    sync_each_batch: bool = False,
    bucket_cap_mb: float = 25.0,
    accumulator_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    broadcast_buffers: Broadcasts = "window_start",
    on_unsupported: Unsupported = "error",
    skip_nonfinite: bool = False,
    rank_timeout: float | None = None,
    shard_optimizer: bool = False,
    overlap_param_gather: bool | None = None,
    commit: Commit | None = None,
    on_update: OnUpdate | None = None,
    self_check: bool = False,
    verbose: bool = True,
    backend: Backend = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    artifact: str | os.PathLike[str] | None = None,
    without: Collection[Optimization] = (),
) -> OptimizedStep[P, R]: ...
@overload
def optimize(
    train_step: None = None,
    *,
    gradient_accumulation_steps: Steps = 1,
    reduction: ReductionKind = "mean",
    process_group: ProcessGroup | None = None,
    device_mesh: DeviceMesh | None = None,
    sync_each_batch: bool = False,
    bucket_cap_mb: float = 25.0,
    accumulator_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    broadcast_buffers: Broadcasts = "window_start",
    on_unsupported: Unsupported = "error",
    skip_nonfinite: bool = False,
    rank_timeout: float | None = None,
    shard_optimizer: bool = False,
    overlap_param_gather: bool | None = None,
    commit: Commit | None = None,
    on_update: OnUpdate | None = None,
    self_check: bool = False,
    verbose: bool = True,
    backend: Backend = "inductor",
    mode: str | None = None,
    dynamic: bool | None = None,
    options: Mapping[str, Any] | None = None,
    artifact: str | os.PathLike[str] | None = None,
    without: Collection[Optimization] = (),
) -> Callable[[Callable[P, R]], OptimizedStep[P, R]]: ...
def optimize(train_step: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Gradient accumulation under data parallelism, in the compiler.

    train_step: an ordinary training step (forward, `backward()`, `optimizer.step()`, of any kind: function, closure,
    method), without accumulation logic. Returned is an `OptimizedStep`, called like it; without `train_step`, a
    decorator. Each call is one micro-step; every k-th call of a window is the boundary, which reduces the window's sums
    over the ranks, once, and updates.

    Keyword arguments:

    gradient_accumulation_steps (1): k, the micro-steps in a window. "manual": a call that reaches `optimizer.step()` is
        the boundary, any other accumulates. A mapping from optimizers to numbers: a window of its own for each.
    reduction ("mean"): sum(g) / n over the n micro-steps really summed on all ranks. "sum": sum(g) over the window,
        averaged over the ranks. "weighted": sum(w g) / sum(w), w from `micro_batch_weight` called in the step.
    process_group (None): the ranks; by default those of a DistributedDataParallel module in the step, else the default
        group where there is one.
    device_mesh (None): a mesh of machines and ranks in each, `init_device_mesh("cpu", (machines, ranks))`: sums are
        reduced in two levels, so that each byte crosses between two machines once, not once per rank.
    sync_each_batch (False): reduce in every micro-step; one update for each window all the same.
    bucket_cap_mb (25.0): MiB of gradients in one all-reduce. DDP's own setting counts where this one is not given. At
        25 the first bucket is closed at 1 MiB, and the others at 4 on the CPU: the wire starts early.
    accumulator_dtype (None): dtype of the running sums; by default float32 for parameters of lower precision, else the
        parameter's own.
    reduce_dtype (None): dtype on the wire; by default the accumulator's. The sum is rounded to it once.
    broadcast_buffers ("window_start"): when rank 0's module buffers go to the others, as in DDP under `no_sync`;
        "every" micro-step, or "never".
    skip_nonfinite (False): a micro-step whose loss or gradients are not finite adds nothing on its rank and does not
        count. Holds all gradients of a micro-step until they were looked at.
    on_unsupported ("error"): a step that cannot be captured whole: "error" names the line and the way out; "eager" runs
        the same windows without the graph rewrite, and says so once.
    rank_timeout (None): seconds that a boundary waits for the other ranks before it raises, compilation not counted;
        by default the group's own timeout.
    shard_optimizer (False): each rank keeps its part of the optimizers' state and makes its part of the updates (ZeRO
        stage 1): sums go in pieces to the ranks that update them, and new parameters are gathered.
        `optimizer.state_dict()` is whole, and a call for all ranks; `optimizer.state` holds this rank's pieces.
    overlap_param_gather (None): with `shard_optimizer`, True lets new parameters arrive under the next call's forward.
        Until then whoever reads them other than through the step, a forward of the modules or state dicts finds the
        old ones: `step.settle()` waits for them. None and False: parameters are new when a call returns.
    commit (None): called without arguments on every rank when the reductions of an update have started; returns whether
        that update counts. One False refuses it on all ranks: parameters and state stay as they were, and the window is
        empty. What it raises refuses, too, and is raised on its own rank.
    on_update (None): called after each update with an `UpdateRecord`: its number, the mean loss of the window over all
        ranks, norms before clipping, terms, bytes, seconds, learning rates. It may be given on some ranks only, waits
        for nothing that it is not asked for, and what it raises ends that call, when the window is closed.
    self_check (False): before the first call, `step.self_check` with its arguments; raises `VerificationError`, with
        the verdict, where the captured window is not the plain eager one. Logged at INFO where it is.
    verbose (True): a call that takes longer than two seconds says on stderr what it is doing (tracing, slicing,
        compiling), on rank 0.
    backend ("inductor"), mode, dynamic, options (None): how programs are lowered, as in `torch.compile`. "aot_eager"
        and "eager" run them with torch's own kernels; a callable gets (GraphModule, example inputs).
    artifact (None): a file of `step.export(path)`, of another rank or machine of the same kind: what it holds is found
        and not compiled. What does not fit (versions, processor, options, shapes) is named in a warning, and compiled
        as usual. It holds code that is run: give a file of your own only.
    without (()): what Inductor's programs are made without, to compare or to find a fault: "overlap" (waits after the
        backward), "in_place" (buckets reduced where they lie), "products" (that add themselves to their sums),
        "updates" (one kernel for parameters of one kind), "shared_compile" (one process of a host compiles for all),
        "invariants" (what depends on parameters alone is computed once per window), "blocks" (layers are compiled
        once).

    >>> step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
    >>> for x, y in batches:  # x: (rows, 8), y: (rows, 1), as the step wants them
    ...     loss = step(model, optimizer, x, y)
    ...     if step.sync_gradients:
    ...         scheduler.step()
    >>> step.flush()  # applies a window that the data ended in the middle of

    Raises `OptionError` for an unknown argument or value. The first call traces and compiles, and raises a
    `CaptureError` that names the line where a step cannot be traced whole.
    """
    checked = Options.of(options)
    if train_step is None:
        return lambda function: _step(function, checked)
    return _step(train_step, checked)


def _step(train_step: Any, options: Options) -> OptimizedStep[..., Any]:
    kind = type(train_step).__name__
    if isinstance(train_step, classmethod | staticmethod):
        raise OptionError(
            "argument 'train_step'",
            seen=f"a {kind}: this decorator stands above @{kind}",
            wanted="the function itself, which is one training step",
            fix=f"put @{kind} above @gradsync_fx.optimize(...)",
        )
    if not callable(train_step):
        raise OptionError(
            "argument 'train_step'",
            seen=f"{train_step!r} of type {kind}, which cannot be called",
            wanted="the function that is one training step",
            fix="pass the function itself, and options by their names",
        )
    return OptimizedStep(train_step, options)


# What `help` and interactive shells show: an unknown argument is an `OptionError`, which lists the legal ones.
optimize.__signature__ = inspect.signature(get_overloads(optimize)[1])  # type: ignore[attr-defined]
