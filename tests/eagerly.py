"""Has every step run eagerly, as one that cannot be captured: the tests of windows are run over both ways."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn
from unittest import mock

import gradsync_fx
from gradsync_fx import dispatch
from gradsync_fx.capture.inquiry import Inquiry, TracedStep
from gradsync_fx.options import Options


FLAG = "GRADSYNC_TESTS_EAGERLY"  # seen by the processes of ranks, too


def asked() -> bool:
    return os.environ.get(FLAG) == "1"


@contextmanager
def eagerly() -> Iterator[None]:
    """Refuses every capture inside, and lets every step run eagerly for it."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise gradsync_fx.CaptureError("the tests", seen="they ask for an eager run")

    def traced(*args: Any, **kwargs: Any) -> TracedStep[Any]:
        refusing = TracedStep[Any](refuse, Inquiry(refuse))
        return refusing

    plain = gradsync_fx.OptimizedStep.__init__

    def init(self: Any, step: Any, options: Options, *args: Any, **kwargs: Any) -> None:
        plain(self, step, replace(options, on_unsupported="eager"), *args, **kwargs)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(dispatch, "traced", traced))
        stack.enter_context(mock.patch.object(gradsync_fx.OptimizedStep, "__init__", init))
        yield


def programs(count: int) -> int:
    """How many programs a step has compiled where a captured one has `count`."""
    return 0 if asked() else count
