"""The window of a captured step: one call at a time, with the counters of the executor.

a capture -> the captured step for it -> a micro-step: the accumulate or a boundary program, as the counter says
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from gradsync_fx.capture.rebound import check_rebound
from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.arrivals import ARRIVALS
from gradsync_fx.comm.rendezvous import ACCUMULATE, BOUNDARY
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.window import NONE


log = logging.getLogger(__name__)


class CapturedWindow:
    """Runs captured steps in windows as the executor's counter has them."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    def on_capture(self, capture: Capture) -> MicroStep:
        """Prepares a capture to run; returns what runs it."""
        executor = self._executor
        options = executor.options
        ARRIVALS.settle()
        for declared in capture.declared:
            declared.check(options.gradient_accumulation_steps)
        for number in capture.numbers:
            number.check(accumulates=options.accumulates, several=options.several_windows)
        check_rebound(capture.step, several=options.several_windows)
        captured, new = executor.catalogue.admit(capture, options)
        log.info(
            "captured %d nodes, %d gradients; %s",
            len(capture.step.module.graph.nodes),
            len(captured.facts.names),
            "new" if new else "its programs exist",
        )
        if not executor.begun:
            executor.begin(captured)
        return MicroStep(executor, captured)

    def prepare(self, captured: CapturedStep) -> None:
        """Compiles what calls like this one will run."""
        executor = self._executor
        if captured.updates:
            captured.programs.compiled(executor.all_parts)
        if not captured.updates or executor.options.accumulates and not executor.options.manual:
            captured.programs.compiled(NONE)
        executor.catalogue.latest = executor.catalogue.latest or captured


@dataclass(frozen=True, slots=True)
class MicroStep:
    """One captured step, to be called with its flat inputs."""

    executor: Executor
    captured: CapturedStep

    def __call__(self, args: list[Any]) -> Any:
        executor, captured = self.executor, self.captured
        executor.start_call()
        if executor.window.pending == 0 or captured is not executor.catalogue.latest:
            parameters = captured.objects.parameters
            executor.accumulators.check_trainable(parameters, executor.next_place())
            captured.programs.check_shares()
        executor.catalogue.latest = captured
        closing = executor.closing(captured)
        if closing:
            return executor.close(captured, BOUNDARY, closing, args)[0]
        if captured.speaks_in_every_call:
            executor.settle()
        after = executor.window.called(summed=True)
        if captured.speaks_in_every_call:
            executor.meet(captured, ACCUMULATE, NONE, after, runs=True)
        if not len(captured.programs) and self._is_closed_as_it_is:
            captured.programs.compile_window(executor.all_parts)
        executor.buffers.before(captured)
        results = captured.micro_step(args, NONE, {})
        executor.accumulators.added(captured.facts.names, weighed=captured.weighs)
        executor.end_call(after)
        return results

    @property
    def _is_closed_as_it_is(self) -> bool:
        """Whether a later call of this window is likely to close it by this capture, with all of its parts."""
        executor, options = self.executor, self.executor.options
        only = executor.catalogue.captures == [self.captured] and self.captured.updates
        return only and not (options.manual or options.several_windows)
