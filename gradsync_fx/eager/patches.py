"""Patches torch's calls that make a training step, while one runs eagerly: what they do at a boundary and otherwise.

                    accumulate call                         boundary
backward            as always                               as always
clip_grad_norm_     nothing; the norm is NaN                the window's gradient is reduced, then as always
optimizer.step()    its gradients are terms of the window;  the window's gradient is reduced, then as always
                    the result is None
zero_grad()         `.grad` becomes None                    `.grad` becomes None; one of the user's own at the end
scheduler.step()    nothing                                 at the end of the step
ddp(x)              ddp.module(x): its reducer never fires

The patches hold for one call of the step, and in its thread.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol
from unittest import mock

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync_fx._torch import total_norm
from gradsync_fx.capture.markers import TRACED
from gradsync_fx.classes import family
from gradsync_fx.optim.state import in_groups
from gradsync_fx.optim.zeroing import NAME, is_own, method_of
from gradsync_fx.threads import EAGER_CALLS, in_this_thread


class CallAnswers(Protocol):
    """Who answers the calls: `EagerCall`."""

    def paused(self) -> AbstractContextManager[None]: ...
    def backward(self, run: Callable[[], None], losses: Any) -> None: ...
    def norm(self, held: list[torch.Tensor], run: Callable[[Any], Any], how: Any) -> Any: ...
    def clip(self, function: Any, parameters: Any, run: Callable[[], Any], how: Any) -> None: ...
    def update(
        self, optimizer: Optimizer, run: Any, closure: Any, args: Any, kwargs: Any
    ) -> Any: ...
    def schedule(self, scheduler: Any, args: Any, kwargs: Any) -> None: ...
    def zero(self, owner: Any, method: Any, run: Any, args: Any, kwargs: Any) -> None: ...
    def weigh(self, weight: Any) -> None: ...
    def scaler(self, scaler: GradScaler, name: str) -> None: ...


@contextmanager
def answering(
    answers: CallAnswers,
    optimizers: Sequence[Optimizer],
    modules: Sequence[nn.Module],
    names: dict[str, Any],
) -> Iterator[None]:
    """Has `answers` answer the calls above. names: the globals of the step, which may hold torch's functions.

    modules: all of the step's whose `zero_grad` is not torch's.
    """
    inside: list[None] = []

    def outermost(answer: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """torch's own calls, made from within one that is answered, stay torch's."""

        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                return plain(*args, **kwargs)
            inside.append(None)
            try:
                with answers.paused():
                    return answer(lambda: plain(*args, **kwargs), *args, **kwargs)
            finally:
                inside.pop()

        return call

    with EAGER_CALLS.held(), ExitStack() as stack:

        def replace(owner: Any, name: str, new: Callable[..., Any]) -> None:
            here = in_this_thread(new, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, here))

        def patch(owner: Any, name: str, answer: Callable[..., Any]) -> None:
            replace(owner, name, outermost(answer, getattr(owner, name)))

        def backward(run: Any, tensors: Any, *args: Any, **kwargs: Any) -> None:
            answers.backward(run, tensors)

        def norm(run: Any, gradients: Any, *args: Any, **kwargs: Any) -> Any:
            held = _being_clipped()
            if held is None:
                return run()
            return answers.norm(held, lambda given: plain_norm(given, *args, **kwargs), args)

        def clip_norm(run: Any, parameters: Any, max_norm: Any, total: Any, *args: Any) -> None:
            answers.clip(clip_grad.clip_grad_norm_, parameters, run, {"max_norm": max_norm})

        def clip_value(run: Any, parameters: Any, clip_value: Any, *args: Any) -> None:
            held = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            run_held = partial(plain_clip_value, held, clip_value, *args)
            answers.clip(plain_clip_value, held, run_held, {"clip_value": clip_value})

        def no_gradients(method: Any, run: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
            if is_own(method):
                answers.zero(owner, method, run, args, kwargs)
            for p in owner.parameters() if isinstance(owner, nn.Module) else in_groups(owner):
                p.grad = None

        def step(run: Any, owner: Any, *args: Any, **kwargs: Any) -> Any:
            first = args[0] if args and callable(args[0]) else kwargs.get("closure")
            return answers.update(owner, run, first, args, kwargs)

        def schedule(run: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
            answers.schedule(owner, args, kwargs)

        plain_clip_value = clip_grad.clip_grad_value_
        plain_norm = total_norm
        patch(torch.autograd, "backward", backward)
        patch(clip_grad, "_get_total_norm", norm)
        patch(clip_grad, "_clip_grads_with_norm_", clip_norm)
        for owner in (clip_grad, torch.nn.utils):
            patch(owner, "clip_grad_value_", clip_value)
        for name, value in names.items():
            if value is plain_clip_value:
                stack.enter_context(
                    mock.patch.dict(names, {name: outermost(clip_value, plain_clip_value)})
                )
        for cls in _with_method(Optimizer, "step"):
            patch(cls, "step", step)
        for optimizer in optimizers:
            if "step" in vars(optimizer):  # a scheduler has put its counter around it
                replace(optimizer, "step", outermost(_bound(step, optimizer), optimizer.step))
        for cls in (nn.Module, *_with_method(Optimizer, NAME)):
            patch(cls, NAME, partial(no_gradients, vars(cls)[NAME]))
        own: list[Any] = [*modules, *(o for o in optimizers if NAME in vars(o))]
        for one in own:
            answer = _bound(partial(no_gradients, method_of(one)), one)
            replace(one, NAME, outermost(answer, one.zero_grad))
        for cls in _with_method(LRScheduler, "step"):
            patch(cls, "step", schedule)
        for method in ("scale", "unscale_", "step", "update"):
            patch(GradScaler, method, _scaler(answers, method))
        replace(DistributedDataParallel, "forward", _inner_forward)
        replace(type(TRACED), "weigh", lambda _, weight: answers.weigh(weight))
        yield


def _being_clipped() -> list[torch.Tensor] | None:
    """The parameters that `clip_grad_norm_`, somewhere up the stack, was given; None where it is not running.

    It hands on the gradients that are there before the window's come: those of another rank's branch would be missing.
    """
    frame = sys._getframe()
    while frame.f_back is not None and frame.f_code.co_name != clip_grad.clip_grad_norm_.__name__:
        frame = frame.f_back
    held = frame.f_locals.get("parameters")
    return list(held) if isinstance(held, list) else None


def _bound(answer: Callable[..., Any], owner: Any) -> Callable[..., Any]:
    return lambda run, *args, **kwargs: answer(run, owner, *args, **kwargs)


def _scaler(answers: CallAnswers, name: str) -> Callable[..., Any]:
    def answer(run: Any, owner: GradScaler, *args: Any, **kwargs: Any) -> Any:
        answers.scaler(owner, name)
        if name == "scale":
            return args[0]
        return args[0].step(*args[1:], **kwargs) if name == "step" else None

    return answer


def _inner_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def _with_method(base: type[Any], name: str) -> list[type]:
    """The class and its subclasses that have a method of this name of their own."""
    return [cls for cls in family(base) if name in vars(cls)]
