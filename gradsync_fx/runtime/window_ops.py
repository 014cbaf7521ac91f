"""Operations on a window other than calls of the step: flush, skip, discard, another length."""

from __future__ import annotations

from typing import Any

from gradsync_fx.comm.arrivals import ARRIVALS
from gradsync_fx.comm.liveness import in_job
from gradsync_fx.comm.rendezvous import ACCUMULATE, BOUNDARY, FLUSH
from gradsync_fx.errors import WindowError
from gradsync_fx.runtime.consistency import SUMS
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.refusals import changed_steps, nothing_captured
from gradsync_fx.runtime.update_watch import tell, timed
from gradsync_fx.runtime.window import NONE
from gradsync_fx.user_lines import warn_user
from gradsync_fx.wording import number_of


def flush(executor: Executor, on_update: Any = None) -> None:
    """Closes the open window with what is summed; participates in the windows of ranks that still have data."""
    executor.integrity.check("flush")
    ARRIVALS.check()
    executor.sync_gradients = False
    step = executor.catalogue.closer()
    if step is None:
        if executor.window.pending or in_job() is not None:
            raise nothing_captured("flush")
        return
    updated = False
    failures: list[BaseException] = []
    while True:
        with timed(executor.watch):
            _, meeting = executor.close(step, FLUSH, NONE, None)
        if meeting.kind == BOUNDARY and executor.sync_gradients:
            updated = True
            if on_update is not None:
                on_update()
        try:
            tell(executor.watch)
        except BaseException as raised:
            failures.append(raised)  # the other ranks' windows go on, with this rank in them
        if meeting.over or executor.stop_agreed:
            break
    executor.buffers.at_end(step)
    ARRIVALS.settle()
    executor.sync_gradients = updated
    executor.raise_refusal()
    for failure in failures:
        raise failure


def skip(executor: Executor) -> None:
    """A slot without data."""
    executor.integrity.check("skip")
    ARRIVALS.check()
    executor.settle()
    step = executor.catalogue.closer()
    if step is None:
        raise nothing_captured("skip")
    if executor.options.manual:
        raise WindowError(
            "skip",
            seen='gradient_accumulation_steps="manual": the step decides where a window ends, not a count of slots',
            wanted="a call of the step, or step.flush()",
            fix="leave the call out on this rank; the mean is over the micro-steps that were made",
        )
    closing = executor.closing(step)
    if closing:
        with timed(executor.watch):
            executor.close(step, BOUNDARY, closing, None)
        executor.raise_refusal()
        tell(executor.watch)
        return
    after = executor.window.called(summed=False)
    if step.speaks_in_every_call:
        meeting = executor.meet(step, ACCUMULATE, NONE, after, runs=False)
        if meeting.someone_runs:
            executor.participate(step)
    executor.end_call(after)


def discard(executor: Executor) -> None:
    """Drops the open window, also one that was loaded and waits for its first call."""
    executor.integrity.check("discard", allowed=SUMS)
    executor.settle()
    executor.integrity.writes(updates=False)
    held = executor.accumulators
    held.restored = {}
    held.restore_in_window([])
    held.clear(executor.all_parts)
    if executor.watch is not None:
        executor.watch.discarded()
    executor.discards += 1
    executor.window = executor.window.closed(executor.all_parts)
    executor.sync_gradients = False
    executor.integrity.over()


def set_steps(executor: Executor, k: Any) -> None:
    """Another window length, at a boundary."""
    executor.integrity.check("gradient_accumulation_steps")
    changed = changed_steps(executor.options, k, executor.window.pending)
    for step in executor.catalogue.steps:
        step.change_steps(changed)
    executor.options = changed


def warn_of_pending(executor: Executor, name: str, line: str) -> None:
    """What the end of a step says of an open window that no state holds."""
    pending = executor.window.pending
    if pending and executor.saved != executor.window:
        warn_user(
            f"{name} ended with {number_of(pending, 'pending micro-step')} in an open window: what was summed is "
            "lost. Call flush() after the last batch, or discard() to drop it on purpose.",
            otherwise=line,
        )
