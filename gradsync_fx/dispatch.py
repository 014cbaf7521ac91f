"""Dispatches a call: to a captured step, or to the step as it is where it cannot be captured and options allow that.

arguments -> traced step (capture/tracer.py) -> CapturedWindow
arguments -> EagerWindow                        after a `CaptureError`, with on_unsupported="eager"
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from gradsync_fx.capture.explained import is_raised
from gradsync_fx.capture.markers import Demand
from gradsync_fx.capture.parallelism import refuse_other_parallelism
from gradsync_fx.capture.tracer import traced
from gradsync_fx.eager.own_errors import raise_own
from gradsync_fx.eager.window import EagerWindow
from gradsync_fx.errors import CaptureError, GradSyncError
from gradsync_fx.inspection.costs import Hardware
from gradsync_fx.inspection.describe import describe
from gradsync_fx.inspection.remarks import mistakes
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.uncaptured import describe_eager
from gradsync_fx.lowering.ahead import look_ahead
from gradsync_fx.lowering.lower import decompositions
from gradsync_fx.runtime.artifact import load_artifact
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.captured_window import CapturedWindow
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.habits import habits
from gradsync_fx.runtime.refusals import EITHER_WAY
from gradsync_fx.user_lines import warn_user


class Dispatch:
    """Calls the traced step, or the step as it is; or only finds which capture some arguments lead to.

    eager: set by the first call that could not be captured. at_end: callbacks for when the step is gone.
    """

    def __init__(self, train_step: Callable[..., Any], executor: Executor) -> None:
        options = executor.options
        if options.artifact is not None:
            load_artifact(options.artifact)
        self._executor, self._demand = executor, Demand()
        self._captured = CapturedWindow(executor)
        again = weakref.WeakMethod(self.again)  # the executor is known when the step is gone
        executor.catalogue.retrace = lambda parameters: (
            found(parameters) if (found := again()) else None
        )
        self._train_step = train_step
        self._last: tuple[Any, Any] | None = None
        self.eager: EagerWindow | None = None
        self._groups: dict[int, list[int]] = {}
        self.at_end = ExitStack()
        self._traced = traced(
            train_step,
            self._captured.on_capture,
            decompositions(options),
            options.dynamic,
            self._demand,
            manual=options.manual,
            rank_timeout=options.rank_timeout,
            norms=options.on_update is not None,
            at_end=self.at_end,
        )

    def __str__(self) -> str:
        """How the step runs, for people."""
        if self.eager is not None:
            return f"runs eagerly, as it cannot be captured ({self.eager.why.culprit})"
        return "captured" if self._executor.catalogue.captures else "not captured yet"

    def call(self, args: Any, kwargs: Any) -> Any:
        """One micro-step: captured, or eagerly where that cannot be and the options allow it."""
        executor, result = self._executor, None
        start, calls = time.perf_counter(), executor.window.micro_step
        try:
            result = self._call(args, kwargs)
            return result
        finally:
            if executor.watch is not None:  # the first call finds out
                added = executor.window.micro_step > calls
                step = executor.catalogue.latest if added else None
                executor.watch.called(step, result, time.perf_counter() - start)

    def _call(self, args: Any, kwargs: Any) -> Any:
        if self.eager is not None:
            return self.eager.run(args, kwargs)
        try:
            return self._captured_call(args, kwargs)
        except CaptureError as why:
            eager = self._run_eagerly(why)
        try:
            result = eager.run(args, kwargs)
        except GradSyncError:
            eager.warn()
            raise
        except Exception:
            self.eager = None  # the step's own: the next call may be captured
            raise
        eager.warn()
        return result

    def prepare(self, args: Any, kwargs: Any) -> None:
        """Makes ready what a call with these arguments needs, without running it."""
        try:
            captured = self.capture_of(args, kwargs)
        except CaptureError as why:
            eager = self._run_eagerly(why)
            eager.warn()
            eager.prepare(args, kwargs)
        else:
            self._captured.prepare(captured)

    def report(self, step: str, line: str, simulated: bool, hardware: str | Hardware) -> Report:
        """Of what was captured so far, or of the windows that run eagerly. step, line: its name and its place."""
        options = self._executor.options
        if self.eager is not None and self.eager.latest is not None:
            return describe_eager(
                self.eager.latest, options, step=step, line=line, hardware=hardware
            )
        captures = self._executor.catalogue.captures
        return describe(
            captures, options, step=step, line=line, simulated=simulated, hardware=hardware
        )

    def _run_eagerly(self, why: CaptureError) -> EagerWindow:
        """From now on without a capture. Raises `why` where the options forbid that, or eager is no way out."""
        if not self._runs_on(why):
            raise why
        self.eager = EagerWindow(self._train_step, self._executor, why)
        return self.eager

    def _runs_on(self, failure: BaseException) -> bool:
        """Whether the step runs eagerly after this, and raises what it raises by itself."""
        eagerly = self._executor.options.on_unsupported == "eager"
        return eagerly and isinstance(failure, CaptureError) and not isinstance(failure, EITHER_WAY)

    def _captured_call(self, args: Any, kwargs: Any) -> Any:
        self._look_at(args, kwargs)
        # Kept while a window is open: closing it may need the step traced anew, with the same arguments.
        self._last = (args, kwargs)
        self._demand.key = self._changed_groups()
        try:
            try:
                result = self._traced(*args, **kwargs)
            except Exception as failure:
                # The user's code after the program, perhaps: then the other ranks wait for the window's second half.
                self._executor.finish()
                # A second time, collectives would hang; and where the step runs on, it would count twice.
                unclear = self._runs_on(failure) and not is_raised(failure.__cause__ or failure)
                if not self._executor.talks and not unclear:
                    raise_own(self._train_step, args, kwargs, failure)
                raise
            self._executor.deferred = self._demand.deferred
            if self._executor.deferred and self._executor.sync_gradients:
                self._executor.make_up()
            self._executor.finish()
            return result
        finally:
            if not self._executor.window.pending:
                self._last = None

    def _look_at(self, args: Any, kwargs: Any) -> None:
        if not self._executor.catalogue.captures:
            refuse_other_parallelism(self._train_step, args, kwargs)
            if self._executor.options.backend == "inductor":
                look_ahead()

    def _changed_groups(self) -> str:
        """What Dynamo has to trace anew for: parameters that an optimizer gained or lost since its first capture."""
        changed: dict[int, list[int]] = {}
        for captured in self._executor.catalogue.captures:
            for optimizer in captured.objects.optimizers:
                groups = getattr(optimizer, "param_groups", ())
                sizes = [len(group["params"]) for group in groups]
                if self._groups.setdefault(id(optimizer), sizes) != sizes:
                    changed[id(optimizer)] = sizes
        return repr(list(changed.values())) if changed else ""

    def capture_of(self, args: Any, kwargs: Any) -> CapturedStep:
        """Captures a call without running it."""
        self._look_at(args, kwargs)
        try:
            micro_step, inputs = self._traced.find(*args, **kwargs)
        except CaptureError as failure:
            raise_own(self._train_step, args, kwargs, failure)
            raise
        micro_step.captured.remember(inputs)
        return micro_step.captured

    def again(self, parameters: dict[str, torch.Tensor]) -> CapturedStep | None:
        """The last call of this window, traced with gradients for exactly these parameters; None without a call."""
        if self._last is None:
            return None
        self._demand.key = f"{self._changed_groups()} {list(parameters)}"
        self._demand.parameters = tuple(parameters.values())
        try:
            return self.capture_of(*self._last)
        finally:
            self._demand.key, self._demand.parameters = "", ()


def warn_of_mistakes(executor: Executor) -> None:
    """After the first call: what the step, and the loop around it, still have of plain accumulation, each once."""
    captures = executor.catalogue.captures
    grows = any(c.updates and c.objects.never_zeroed for c in captures)
    for text in (*mistakes(captures, executor.options), *habits(zeroes=not grows)):
        warn_user(text)
