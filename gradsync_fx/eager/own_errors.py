"""Finds the user's own exception where a trace or a program failed because the step itself raises.

A trace runs the step on tensors without values, and what the step raises there becomes torch's report of it; what a
program raises names no line of the step. Where either failed, the step itself is run once, as it stands and with its
own arguments:

it raises         that is the user's exception: type, message and line are those of plain PyTorch
it does not       trace or program failed for a reason of their own

Such a run updates nothing, and parameters, buffers, gradients and random numbers are put back after it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx._torch import TorchDynamoException, detect_fake_mode
from gradsync_fx.capture.explained import ENDS_OF_TRACES, may_be_raised
from gradsync_fx.capture.reachable import Found, discover
from gradsync_fx.checking.reference_window import same_random_numbers
from gradsync_fx.comm.rank_failure import is_of_connection
from gradsync_fx.eager.patches import answering
from gradsync_fx.errors import CaptureError, GradSyncError
from gradsync_fx.optim.zeroing import own_among
from gradsync_fx.user_lines import OURS, is_users


def raise_own(function: Callable[..., Any], args: Any, kwargs: Any, failure: BaseException) -> None:
    """Raises what the step raises by itself, where `failure` may come of that: a trace that failed, or a program."""
    began = failure.__cause__ if isinstance(failure, CaptureError) else failure
    if began is not None and (_ended_a_trace(began) or _ended_a_program(began)):
        own = _raised_by(function, args, kwargs)
        if own is not None:
            raise own from own.__cause__


def _raised_by(function: Callable[..., Any], args: Any, kwargs: Any) -> Exception | None:
    try:
        found = discover(function, args, kwargs)
    except TypeError as own:  # arguments that are not the function's
        return own
    tensors = _tensors(found)
    inner = inspect.unwrap(getattr(function, "__func__", function))
    names: dict[str, Any] = getattr(inner, "__globals__", {})
    # Stand-ins of a meta model meet no real tensors.
    mode: Any = detect_fake_mode(tensors) or nullcontext()
    with _put_back(tensors), same_random_numbers(), mode:
        try:
            with answering(_Nothing(), found.optimizers, own_among(found.modules), names):
                function(*args, **kwargs)
        except (torch.OutOfMemoryError, GradSyncError):
            return None
        except Exception as own:
            return own
    return None


def _ended_a_trace(failure: BaseException) -> bool:
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, GradSyncError):
            return False  # refused by this package
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    return isinstance(failure, TorchDynamoException) and may_be_raised(failure)


def _ended_a_program(failure: BaseException) -> bool:
    """A label that is out of range, say, is seen by no trace."""
    if isinstance(failure, (GradSyncError, *ENDS_OF_TRACES)) or is_of_connection(failure):
        return False
    return not any(is_users(file) for _, file in _frames(failure))


def _tensors(found: Found) -> list[torch.Tensor]:
    inside = [t for _, m in found.modules for t in (*m.parameters(), *m.buffers())]
    return list(dict.fromkeys([*inside, *found.tensors.values()]))


@contextmanager
def _put_back(tensors: list[torch.Tensor]) -> Iterator[None]:
    before = [(t, t._version, t.grad, t.detach().clone()) for t in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, version, gradient, value in before:
                tensor.grad = gradient
                if tensor._version != version:
                    tensor.copy_(value)


class _Nothing:
    """CallAnswers the calls of patches.py: gradients are made, clipped and dropped."""

    def paused(self) -> AbstractContextManager[None]:
        return nullcontext()

    def backward(self, run: Callable[[], None], losses: Any) -> None:
        run()

    def norm(self, held: list[torch.Tensor], run: Callable[[Any], Any], how: Any) -> Any:
        return run([p.grad for p in held if p.grad is not None])

    def clip(self, function: Any, parameters: Any, run: Callable[[], Any], how: Any) -> None:
        run()

    def update(self, optimizer: Optimizer, run: Any, closure: Any, args: Any, kwargs: Any) -> Any:
        return closure() if closure is not None else None

    def schedule(self, scheduler: Any, args: Any, kwargs: Any) -> None: ...

    def zero(self, owner: Any, method: Any, run: Any, args: Any, kwargs: Any) -> None: ...

    def weigh(self, weight: Any) -> None: ...

    def scaler(self, scaler: torch.amp.GradScaler, name: str) -> None: ...


class UsersFrames:
    """Blocks whose exceptions show the user's frames: those of this package, and of what it calls, are left out.

    Errors of the package keep all of theirs.
    """

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if failure is None or isinstance(failure, GradSyncError):
            return
        _forget_ours(failure)
        frames = _frames(failure)
        first = next((i for i, (_, file) in enumerate(frames) if is_users(file)), len(frames))
        shown: TracebackType | None = None
        for frame, file in reversed(frames[first:]):
            if not file.startswith(OURS):
                shown = TracebackType(shown, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        if shown is not None:
            failure.__traceback__ = shown


def _forget_ours(failure: BaseException) -> None:
    """The user's exception is no consequence of what this package, or torch's trace, raised before it."""
    chain: list[BaseException] = [failure]
    for one in chain:  # grows on the way
        if isinstance(one.__context__, GradSyncError | TorchDynamoException):
            one.__context__ = None
        before = (one.__cause__, one.__context__)
        chain += [e for e in before if e is not None and all(e is not known for known in chain)]


def _frames(failure: BaseException) -> list[tuple[TracebackType, str]]:
    """An exception's, outermost first, each with its file."""
    found, trace = [], failure.__traceback__
    while trace is not None:
        found.append((trace, trace.tb_frame.f_code.co_filename))
        trace = trace.tb_next
    return found


USERS_FRAMES = UsersFrames()
