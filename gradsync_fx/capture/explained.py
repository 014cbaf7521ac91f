"""Translates torch's errors of a failed trace into this package's, with the user's line."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from gradsync_fx._torch import (
    GuardOnDataDependentSymNode,
    TorchDynamoException,
    TorchRuntimeError,
    dynamo_exc,
)
from gradsync_fx.errors import CaptureError, GradSyncError
from gradsync_fx.user_lines import lines_in, users_among


# What Dynamo raises where it cannot trace a step.
_LIMIT_HIT = dynamo_exc.FailOnRecompileLimitHit
ENDS_OF_TRACES = (TorchDynamoException, GuardOnDataDependentSymNode, _LIMIT_HIT)


def explained(failure: BaseException, function: Callable[..., Any]) -> GradSyncError:
    """This package's error inside torch's, or else a `CaptureError` made of torch's reason and the user's line."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, GradSyncError):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    if isinstance(failure, _LIMIT_HIT):
        return _too_many(function)
    if _ATTACHED in str(failure):
        return _attached(_culprit(str(failure), function))
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    explanation = next((line.partition(":")[2] for line in lines if _EXPLAINS in line), "").strip()
    seen = lines[0].removeprefix(_ADVICE) if lines else type(failure).__name__
    raised = next((line.partition("raised exception")[2] for line in lines if _RAISED in line), "")
    reason = f"the step raises: {raised.strip()}" if raised else explanation
    return CaptureError(
        f"graph break at {_culprit(str(failure), function)}",
        seen=f"{seen} ({reason})" if reason and reason != seen else seen,
        wanted="a step that is traced whole",
        # torch's own hints are for its compiler's graph breaks, and lead nowhere here.
        fix='pass on_unsupported="eager": the same windows, without the graph rewrite; or leave this line out',
    )


def _attached(culprit: str) -> CaptureError:
    return CaptureError(
        f"what the step returns, at {culprit}",
        seen="a tensor that backward has gone through, inside of an object",
        wanted="tensors without a graph; those in tuples, lists and dictionaries lose theirs by themselves",
        fix='return it detached (loss.detach()), or in a dictionary; or pass on_unsupported="eager"',
    )


def _too_many(function: Callable[..., Any]) -> CaptureError:
    return CaptureError(
        f"the captures of {_place(function)}",
        seen="there are as many as there may be, and this call fits none of them: a number or a shape that the step "
        'depends on is another one in each call (TORCH_LOGS="recompiles" says which)',
        wanted="a step that few captures serve",
        fix="keep a number that changes in a tensor (torch.tensor(0.1)) and write to that; dynamic=True is for shapes; "
        'or pass on_unsupported="eager"',
    )


_ATTACHED = "consumed returned tensor's grad_fn"
_ADVICE = "Consider annotating your code using torch._check*(). "
_RAISED, _EXPLAINS = "raised exception", "Explanation"


def _culprit(text: str, function: Callable[..., Any]) -> str:
    """The last line of the user's own that torch's report of a failed trace names."""
    return users_among(lines_in(text)) or _place(function)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "the step"


# Dynamo's reasons that are an exception of the step itself, raised in eager PyTorch as well.
_RAISED_BY_STEP = (
    "Attempted to read undefined local variable",
    "Observed exception",
    "Tensor device mismatch",
    "TypeError when making fake tensor call",
    "Unhandled tensor method",
    "autograd.grad with already consumed grad_fn",
    "failed to bind arguments",
    "failed to broadcast",
    "failed to find name",
    "missing ",
)


# Those that may hide one, or say what Dynamo does not know.
_UNCLEAR = ("Data-dependent assertion failed", "Import failure", "Unsupported function call")


def is_raised(failure: BaseException) -> bool:
    """Whether a trace failed, by torch's reason, because the step raises."""
    reason = getattr(failure, "gb_type", None) or ""
    return isinstance(failure, TorchRuntimeError) or reason.startswith(_RAISED_BY_STEP)


def may_be_raised(failure: TorchDynamoException) -> bool:
    """Whether a trace may have failed because the step raises: by torch's reason, or by the statement it stopped at."""
    reason = getattr(failure, "gb_type", None) or ""
    if is_raised(failure) or reason.startswith(_UNCLEAR):
        return True
    lines = [linecache.getline(file, int(line)).lstrip() for file, line in lines_in(str(failure))]
    return any(line.startswith(("raise ", "assert ")) for line in lines)
