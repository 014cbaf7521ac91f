"""Puts the answers of answers.py into Dynamo while a step is being traced, and at no other time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch.nn.parallel import DistributedDataParallel

from gradsync_fx import answers
from gradsync_fx._torch import (
    OptimizerVariable,
    TensorVariable,
    UserDefinedObjectVariable,
    dynamo_config,
)
from gradsync_fx.observed import Observed, observing


@contextmanager
def intercepting(demanded: tuple[torch.Tensor, ...] = ()) -> Iterator[Observed]:
    """Patches Dynamo for one trace; yields what the trace meets. Everything is restored at the end.

    demanded: parameters that receive a gradient in any case, of zeros where the step gives none.
    """
    with ExitStack() as stack:
        seen = stack.enter_context(observing(demanded))
        seen.answers = _of_libraries()
        stack.enter_context(
            dynamo_config.patch(
                trace_autograd_ops=True,
                optimize_ddp=False,
                recompile_limit=max(64, dynamo_config.recompile_limit),
                ignore_logging_functions=_logging_functions(),
            )
        )
        for owner, name, new in (
            (UserDefinedObjectVariable, "var_getattr", answers.var_getattr),
            (OptimizerVariable, "var_getattr", answers.var_getattr),
            (TensorVariable, "method_backward", answers.backward),
            (DistributedDataParallel, "forward", answers.ddp_forward),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield seen


def _of_libraries() -> answers.Answers:
    """The answers at the calls of libraries that the program has imported itself: nothing is imported for the rest."""
    if "accelerate.accelerator" in sys.modules:
        from gradsync_fx.integrations import accelerate  # imports the library

        return accelerate.ANSWERS
    return []


def _logging_functions() -> set[Any]:
    """Loggers' methods: dropped from the trace, so that a model's `logger.warning` breaks nothing."""
    names = ("debug", "info", "warning", "warning_once", "error", "log")
    found = {getattr(logging.Logger, n, None) for n in names} - {None}
    return set(dynamo_config.ignore_logging_functions) | found
