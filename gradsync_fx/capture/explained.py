"""Translates torch's errors of a failed trace into this package's, with the user's line."""

from __future__ import annotations

import linecache
from collections.abc import Callable
from typing import Any

from gradsync_fx._torch import TorchDynamoException, TorchRuntimeError
from gradsync_fx.errors import CaptureError, GradSyncError
from gradsync_fx.user_lines import lines_in, users_among


def explained(failure: BaseException, function: Callable[..., Any]) -> GradSyncError:
    """This package's error inside torch's, or else a `CaptureError` made of torch's reason and the user's line."""
    cause: BaseException | None = failure
    while cause is not None:
        if isinstance(cause, GradSyncError):
            return cause
        cause = getattr(cause, "inner_exception", None) or cause.__cause__
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    explanation = next((line.partition(":")[2] for line in lines if _EXPLAINS in line), "").strip()
    seen = lines[0] if lines else type(failure).__name__
    raised = next((line.partition("raised exception")[2] for line in lines if _RAISED in line), "")
    reason = f"the step raises: {raised.strip()}" if raised else explanation
    return CaptureError(
        f"graph break at {_culprit(str(failure), function)}",
        seen=f"{seen} ({reason})" if reason and reason != seen else seen,
        wanted="a step that is traced whole",
        # torch's own hints are for its compiler's graph breaks, and lead nowhere here.
        fix='pass on_unsupported="eager": the same windows, without the graph rewrite; or leave this line out',
    )


_RAISED, _EXPLAINS = "raised exception", "Explanation"


def _culprit(text: str, function: Callable[..., Any]) -> str:
    """The last line of the user's own that torch's report of a failed trace names."""
    code = getattr(function, "__code__", None)
    own = users_among(lines_in(text))
    return own or (f"{code.co_filename}:{code.co_firstlineno}" if code else "the step")


# Dynamo's reasons that may hide an exception of the step itself, raised in eager PyTorch as well.
_RAISING = (
    "Attempted to read undefined local variable",
    "Data-dependent assertion failed",
    "Import failure",
    "Observed exception",
    "Tensor device mismatch",
    "TypeError when making fake tensor call",
    "Unhandled tensor method",
    "Unsupported function call",
    "autograd.grad with already consumed grad_fn",
    "failed to bind arguments",
    "failed to broadcast",
    "failed to find name",
    "missing ",
)


def may_be_raised(failure: TorchDynamoException) -> bool:
    """Whether a trace may have failed because the step raises: by torch's reason, or by the statement it stopped at."""
    if isinstance(failure, TorchRuntimeError) or (
        getattr(failure, "gb_type", None) or ""
    ).startswith(_RAISING):
        return True
    lines = [linecache.getline(file, int(line)).lstrip() for file, line in lines_in(str(failure))]
    return any(line.startswith(("raise ", "assert ")) for line in lines)
