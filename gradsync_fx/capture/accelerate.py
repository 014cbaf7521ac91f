"""Handlers at the calls of Hugging Face Accelerate: its own window gives way to the step's.

accelerator.backward(loss)       loss.backward(): the division by Accelerate's k is left out, the window has its own;
                                 that k may be 1, its default, or the step's, and is an error where it is another
accelerator.accumulate(model)    nothing: which call is the boundary is not Accelerate's to say
accelerator.sync_gradients       True: what stands under it runs at the boundary, like all that reads gradients
accelerator.clip_grad_norm_      torch.nn.utils.clip_grad_norm_, and the same for clip_grad_value_
accelerator.autocast()           the torch.autocast that it stands for
accelerator.no_sync(model)       nothing; remembered for the report
optimizer.step(), zero_grad()    those of the optimizer inside
scheduler.step()                 the host's call after each update, as often as Accelerate would: once for each process
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType
from accelerate.utils.modeling import get_mixed_precision_context_manager

from gradsync_fx._torch import NullContextVariable, read_attribute
from gradsync_fx.capture.handlers import (
    AnsweredAttribute,
    Handlers,
    after_update,
    guard_identity,
    no_sync,
    optimizer_step,
    zero_grad,
)
from gradsync_fx.capture.trace_state import (
    Declared,
    call,
    const,
    is_none,
    line_of,
    observed,
    refuse,
)


_SHARDED = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM)


def _check(tx: Any, owner: Any, what: str) -> None:
    accelerator: Accelerator = owner.value
    guard_identity(owner)
    kind = accelerator.distributed_type
    if kind in (*_SHARDED, DistributedType.XLA):
        refuse(
            tx,
            f"accelerator.{what}",
            seen=f"an Accelerator that trains with {kind.value}, whose reductions are not in the step",
            wanted="data parallelism over whole copies of the model",
            fix="build the Accelerator without this plugin: it then wraps the model in DistributedDataParallel",
        )
    if accelerator.scaler is not None and accelerator.scaler.is_enabled():
        refuse(
            tx,
            f"accelerator.{what}",
            seen='mixed_precision="fp16", whose gradient scaler decides on the host, in the middle of the update',
            wanted="a step without GradScaler",
            fix='Accelerator(mixed_precision="bf16"), which needs no scaler',
        )


def _backward(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _check(tx, owner, "backward")
    declared = owner.value.gradient_accumulation_steps
    if declared > 1:  # 1 is Accelerate's default: it says nothing
        where = f"the Accelerator of accelerator.backward, at {line_of(tx)}"
        observed().in_graph(tx.output).declared.append(Declared(where, declared))
    loss = args.pop(0) if args else kwargs.pop("loss")
    if "learning_rate" in kwargs:
        refuse(
            tx,
            "accelerator.backward",
            seen="learning_rate=, for an optimizer that updates inside backward",
            wanted="an optimizer whose update is its step()",
            fix="use an optimizer of torch.optim, or one that is built like them",
        )
    return loss.call_method(tx, "backward", args, kwargs)


def _clip(function: Callable[..., Any]) -> Callable[..., Any]:
    def answer(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _check(tx, owner, function.__name__)
        return call(tx, function, *args, **kwargs)

    return answer


def _nothing(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _check(tx, owner, "unscale_gradients")
    return const(None)


def _accumulate(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _check(tx, owner, "accumulate")
    return NullContextVariable()


def _autocast(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    _check(tx, owner, "autocast")
    given: Any = args[0] if args else kwargs.get("autocast_handler")
    handler = owner.value.autocast_handler if is_none(given) else given.value
    context = get_mixed_precision_context_manager(owner.value.native_amp, handler)
    if not isinstance(context, torch.autocast):
        return NullContextVariable()
    parts = (context.device, context.fast_dtype, context._enabled, context._cache_enabled)
    return call(tx, _new_autocast, *map(const, parts))


def _new_autocast(device: str, dtype: torch.dtype, enabled: bool, cached: bool) -> torch.autocast:
    """Traced: Dynamo enters a context only where it sees it made."""
    return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=cached)


def _sync_gradients(tx: Any, owner: Any) -> Any:
    _check(tx, owner, "sync_gradients")
    return const(True)


def _inner(answer: Callable[..., Any]) -> Callable[..., Any]:
    """The answer at a torch optimizer's method, for the one that Accelerate has wrapped."""

    def of_inner(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        guard_identity(owner)
        return answer(tx, read_attribute(owner, tx, "optimizer").realize(), args, kwargs)

    return of_inner


class _Stepped:
    """A prepared scheduler as the host steps it: after an update, whatever Accelerate takes this call for."""

    def __init__(self, scheduler: AcceleratedScheduler) -> None:
        self._scheduler = scheduler

    def step(self, *args: Any) -> None:
        state = self._scheduler.gradient_state
        before, state.sync_gradients = state.sync_gradients, True
        try:
            self._scheduler.step(*args)
        finally:
            state.sync_gradients = before


# One for each scheduler, as long as a capture holds it: captures are told apart by whom they call.
_stepped: weakref.WeakValueDictionary[int, _Stepped] = weakref.WeakValueDictionary()


def _scheduler_step(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    guard_identity(owner)
    scheduler: AcceleratedScheduler = owner.value
    stepped = _stepped.setdefault(id(scheduler), _Stepped(scheduler))
    (first, *_) = scheduler.optimizers
    inner = first.optimizer if isinstance(first, AcceleratedOptimizer) else first
    return after_update(tx, stepped, inner, args, kwargs)


HANDLERS: Handlers = [
    (AcceleratedOptimizer, ("step",), _inner(optimizer_step)),
    (AcceleratedOptimizer, ("zero_grad",), _inner(zero_grad)),
    (AcceleratedScheduler, ("step",), _scheduler_step),
    (Accelerator, ("backward",), _backward),
    (Accelerator, ("clip_grad_norm_",), _clip(torch.nn.utils.clip_grad_norm_)),
    (Accelerator, ("clip_grad_value_",), _clip(torch.nn.utils.clip_grad_value_)),
    (Accelerator, ("unscale_gradients",), _nothing),
    (Accelerator, ("accumulate",), _accumulate),
    (Accelerator, ("no_sync",), no_sync),
    (Accelerator, ("autocast",), _autocast),
    (Accelerator, ("sync_gradients",), AnsweredAttribute(_sync_gradients)),
]
