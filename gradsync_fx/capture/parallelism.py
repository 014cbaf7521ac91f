"""Refuses steps that are parallel in another way than by data, by their objects, before the first call.

Sharded parameters and pipelines have reductions, gathers and updates of their own, at times of
their own. Neither a trace nor an eager run of this package may come between them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from gradsync_fx._torch import tree_leaves
from gradsync_fx.capture.reachable import Found, discover
from gradsync_fx.errors import ParallelismError


_WHOLE = "an nn.Module, as it is or in DistributedDataParallel, with whole parameters on each rank"


def refuse_other_parallelism(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    """Raises `ParallelismError` for the first such object that the step leads to."""
    try:
        found = discover(function, args, kwargs)
    except (TypeError, ValueError):
        return  # other arguments than it takes: the call itself says so
    for error in (*_of_modules(found), *_of_tensors(found, args, kwargs), *_of_others(found)):
        raise error


def _of_modules(found: Found) -> Iterator[ParallelismError]:
    fully_shard = _class("torch.distributed.fsdp", "FSDPModule")
    wrapper = _class("torch.distributed.fsdp", "FullyShardedDataParallel")
    for path, root in found.modules:
        for name, module in root.named_modules():
            how = "fully_shard (FSDP2)" if isinstance(module, fully_shard) else ""
            how = how or ("FullyShardedDataParallel" if isinstance(module, wrapper) else "")
            if how:
                yield ParallelismError(
                    f"module {'.'.join(p for p in (path, name) if p)!r}",
                    seen=f"{how} shards its parameters over the ranks, and gathers and reduces them by its own hooks",
                    wanted=_WHOLE,
                    fix="wrap the model in DistributedDataParallel, or pass it as it is; for parameters that only fit "
                    "in shards, accumulate with FSDP's own set_requires_gradient_sync",
                )


def _of_tensors(found: Found, args: Any, kwargs: Any) -> Iterator[ParallelismError]:
    dtensor = _class("torch.distributed.tensor", "DTensor")
    held: dict[str, Any] = {
        ".".join(p for p in (path, name) if p): parameter
        for path, root in found.modules
        for name, parameter in root.named_parameters()
    }
    given = {f"argument tensor {i}": v for i, v in enumerate(tree_leaves((args, kwargs)))}
    for name, tensor in {**held, **found.tensors, **given}.items():
        if isinstance(tensor, dtensor):
            placed: Any = tensor
            yield ParallelismError(
                f"tensor {name!r}",
                seen=f"a DTensor, placed as {placed.placements} over a mesh of {placed.device_mesh.size()} devices "
                "(tensor parallelism, say)",
                wanted=_WHOLE,
                fix="leave parallelize_module or distribute_tensor out, and wrap the model in DistributedDataParallel",
            )


def _of_others(found: Found) -> Iterator[ParallelismError]:
    for path, value in found.pipelines:
        yield ParallelismError(
            f"{type(value).__name__} {path!r}",
            seen="a pipeline: it cuts the batch, and runs forward and backward of its stage by a schedule of its own",
            wanted="a step that computes its loss and calls backward itself",
            fix="run pipelines without gradsync_fx: their schedule accumulates over its own micro-batches",
        )


def _class(module: str, name: str) -> Any:
    """A class of torch; no class where its module was not imported: then nothing is of it."""
    return getattr(sys.modules.get(module), name, ())
