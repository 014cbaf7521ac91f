"""The runtime: one window, and the choice of a program by the counter.

An accumulate call runs one program and speaks to nobody. A window closes in a call, in a slot without data (skip) or
after the data (flush); in all three the ranks tell each other where they stand, and then each of them

    runs the boundary program (or the tail program, without data)     if all ranks have the same gradients to reduce
                                                                      and each has a term that certainly counts,
                                                                      and either all of them have data or none
    runs the accumulate program, then the tail for the union of what  otherwise: branches that differ, or weights that
    the ranks' windows hold, or makes no update if that is nothing    may all be zero; a rank without data among others,
                                                                      as an update compiled into another program
                                                                      may round otherwise
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.collectives import Agreement
from gradsync_fx.comm.drift import Drift
from gradsync_fx.comm.rendezvous import (
    ACCUMULATE,
    BOUNDARY,
    FLUSH,
    Line,
    Meeting,
    Position,
    check_same_layout,
    check_same_window,
)
from gradsync_fx.comm.replica_check import check_replicas
from gradsync_fx.lowering.lower import as_it_is
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting, shared_options
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.capture_cache import Catalogue, Found
from gradsync_fx.runtime.captured_step import NONE, CapturedStep
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.divisors import Divisors, divisors_of, totals_of
from gradsync_fx.runtime.eager_step import EagerStep
from gradsync_fx.runtime.module_buffers import ModuleBuffers
from gradsync_fx.runtime.refusals import no_call_yet, no_common_tail
from gradsync_fx.runtime.window import WindowState
from gradsync_fx.user_lines import warn_user


log = logging.getLogger(__name__)


class Executor:
    """Owns the window: counter, accumulators, captures. Everything that `optimize`'s step offers is asked of it.

    simulated: a number of ranks that are not there; then steps are captured and programs built, and nothing runs.
    """

    def __init__(self, options: Options, simulated: int | None = None) -> None:
        self.options = options
        self._simulated = simulated is not None
        self.window = WindowState.fresh(len(options.steps))
        self.sync_gradients = False
        self.accumulators = Accumulators(len(options.steps))
        self.integrity = Integrity()
        self.catalogue = Catalogue(self.accumulators, self.integrity, simulated)
        self.buffers = ModuleBuffers()
        self.drift = Drift()
        self.only_find = False
        self.saved: WindowState | None = None
        self._line, self._begun = Line(None, None), False
        self._agreement = Agreement()
        self.discards = 0
        self.deferred: Sequence[Callable[[], None]] = ()
        self._apart: tuple[CapturedStep, Meeting, list[Any]] | None = None

    @property
    def captures(self) -> list[CapturedStep]:
        return self.catalogue.captures

    def on_capture(self, capture: Capture) -> Any:
        """Prepares a capture to run; returns what runs it."""
        for declared in capture.declared:
            declared.check(self.options.gradient_accumulation_steps)
        for number in capture.numbers:
            accumulates, several = self.options.accumulates, self.options.several_windows
            number.check(accumulates=accumulates, several=several)
        captured, new = self.catalogue.admit(capture, self.options)
        log.info(
            "captured %d nodes, %d gradients; %s",
            len(capture.step.module.graph.nodes),
            len(captured.names),
            "new" if new else "its programs exist",
        )
        if not (self._begun or self._simulated):
            self.begin(captured)
        return lambda args: self.run(captured, args)

    def begin(self, captured: CapturedStep | EagerStep) -> None:
        """All ranks' first step: from here on they can speak to each other. Made again by the next call if it fails."""
        self.integrity.check("the first call")
        setting, capture = captured.setting, captured.capture
        self._line = Line(setting.group, self.options.rank_timeout)
        shared = {n: p for n, p in capture.parameters.items() if n not in setting.ignored}
        if setting.group is not None:
            with self.integrity.among_ranks():
                alike = shared_options(setting, self.options)
                check_replicas(self._line, alike, shared, setting.shared_buffers)
        self.buffers.first(captured)
        self.drift.begin(shared)
        self._begun = True
        self.integrity.over()

    def prepare(self, captured: CapturedStep) -> None:
        """Compiles what calls like this one will run."""
        if captured.updates:
            captured.compile(self.all_parts)
        if not captured.updates or self.options.accumulates and not self.options.manual:
            captured.compile(NONE)
        self.catalogue.latest = self.catalogue.latest or captured

    @property
    def all_parts(self) -> frozenset[int]:
        return frozenset(range(len(self.window.parts)))

    def run(self, captured: CapturedStep, args: list[Any]) -> Any:
        """One micro-step: the accumulate or a boundary program, as the counter (or the step itself) says."""
        if self.only_find:
            captured.remember(args)
            raise Found(captured)
        self.deferred, self.sync_gradients = (), False
        self._apart = None  # of a call that was cut off, and has been dropped since
        if self.window.pending == 0 or captured is not self.catalogue.latest:
            self.accumulators.check_trainable(captured, self.next_place())
        self.catalogue.latest = captured
        closing = self.closing(captured)
        if closing:
            return self.close(captured, BOUNDARY, closing, args)[0]
        after = self.window.called(summed=True)
        if captured.speaks_in_every_call:
            self.meet(captured, ACCUMULATE, NONE, after, runs=True)
        self.buffers.before(captured)
        results = captured.micro_step(args, NONE, {})
        self.accumulators.added(captured.names, weighed=captured.weighs)
        self.window, self.sync_gradients = after, False
        self.integrity.over()
        return results

    @property
    def talks(self) -> bool:
        """Whether the step that ran last has collectives of its own in it."""
        latest = self.catalogue.latest
        return latest is not None and latest.collectives.each_call > 0

    def closing(self, captured: CapturedStep | EagerStep) -> frozenset[int]:
        """The parts that the next call closes."""
        if self.options.manual:
            return self.all_parts if captured.updates else NONE
        return self.window.closing(self.options.steps)

    def place(self) -> str:
        """Where this rank's next call stands among the ranks, for people."""
        window = self.window
        return self._line.place(window.pending + 1, max(self.options.steps), window.optimizer_step)

    def absent(self) -> list[int]:
        """The ranks that are missing in a program, where that is known."""
        return self._line.absent(behind=True)

    def next_place(self) -> str:
        """Where the next call stands, for people."""
        return f"micro-step {self.window.pending + 1}/{max(self.options.steps) or '?'}"

    def meet(
        self,
        captured: CapturedStep | EagerStep,
        kind: int,
        closing: frozenset[int],
        after: WindowState,
        *,
        runs: bool,
    ) -> Meeting:
        """Tells the other ranks where this one stands, and learns it of them."""
        mine = Position(
            kind=kind,
            runs=runs,
            k=max(self.options.steps),
            pending=after.pending,
            closing=sum(1 << part for part in closing),
            optimizer_step=self.window.optimizer_step,
            layout=captured.layout_for(self.accumulators.in_window),
            certain=captured.certain(self.accumulators.in_window, closing),
            discards=self.discards,
            settled=captured.settled,
            collectives=captured.collectives.number,
            bound=captured.collectives.bound(closes=bool(closing)) if runs else 0,
            fed=max(part.summed for part in after.parts),
            weights=self._weights(captured, after),
        )
        with self.integrity.among_ranks(alone=self._line.group is None):
            self.drift.compare(self._line)
            meeting = self._line.meet(mine)
            self._agreement.check(self._line, meeting, captured.collectives)
            check_same_window(meeting)
            self.buffers.follow(meeting)
            if meeting.someone_runs and self.options.sync_each_batch:
                check_same_layout(meeting)
        return meeting

    def _weights(self, captured: CapturedStep | EagerStep, after: WindowState) -> tuple[float, ...]:
        if not captured.weighs:
            return tuple(float(part.summed) for part in after.parts)
        return tuple(float(weight) for weight in self.accumulators.weights.values())

    def _divisors(self, totals: list[float]) -> Divisors:
        world = self.setting.world if self.setting is not None else 1
        return divisors_of(totals, self.options.reduction, world)

    @property
    def setting(self) -> Setting | None:
        """The ranks and their group; None before the first step."""
        steps = self.catalogue.steps
        return steps[0].setting if steps and self._begun else None

    def close(
        self,
        captured: CapturedStep | EagerStep,
        kind: int,
        closing: frozenset[int],
        args: list[Any] | None,
    ) -> tuple[list[Any], Meeting]:
        """Ends the window of the closing parts together with all ranks; see the module's text."""
        runs = args is not None
        after = self.window if kind == FLUSH else self.window.called(summed=runs)
        meeting = self.meet(captured, kind, closing, after, runs=runs)
        if runs:
            self.buffers.before(captured)
        elif meeting.someone_runs:
            self.keep_company(captured)
        if meeting.kind == ACCUMULATE:
            self.integrity.over()
            return [], meeting
        closing = meeting.closing
        totals = totals_of(p.weights for p in meeting.ranks)
        results: list[Any] = []
        if isinstance(captured, EagerStep):
            # Its own calls close its windows (eager/window.py): this is an end without data.
            self.window = after
            updated = self._close_in_turn(captured, meeting)
        elif (
            meeting.certain
            and all(totals[part] > 0 for part in closing)
            and (meeting.all_or_none_run or as_it_is(self.options))
        ):
            updated, divisors = closing, self._divisors(totals)
            with captured.side_by_side(self._line, settled=all(p.settled for p in meeting.ranks)):
                if args is not None:
                    results = captured.micro_step(args, closing, divisors)
                    self.accumulators.added(captured.names, weighed=captured.weighs)
                else:
                    captured.tail(closing, divisors)
            self.window = after
        else:
            if args is not None:
                results = captured.micro_step(args, NONE, {})
                self.accumulators.added(captured.names, weighed=captured.weighs)
            self.window, self._apart = after, (captured, meeting, results)
            if not runs:
                self.finish()
            return results, meeting
        self.end_window(captured, meeting, updated)
        return results, meeting

    def finish(self) -> None:
        """The second half of a window that closes apart: outside of the traced call, which it may trace anew."""
        if self._apart is None:
            return
        (captured, meeting, results), self._apart = self._apart, None
        updated = self._close_apart(captured, meeting, results)
        self.end_window(captured, meeting, updated)

    def make_up(self) -> None:
        """What waited for an update: numbers that the latest call would have changed."""
        deferred, self.deferred = self.deferred, ()
        for do in deferred:
            do()

    def end_window(
        self, captured: CapturedStep | EagerStep, meeting: Meeting, updated: frozenset[int]
    ) -> None:
        """The closing parts start anew, whether they were updated or had nothing to update with."""
        closing = meeting.closing
        # A program resets what it closed; an eager step leaves that to us.
        self.accumulators.clear(closing if isinstance(captured, EagerStep) else closing - updated)
        self.accumulators.closed(closing)
        self.window = self.window.closed(closing, updated=bool(updated))
        self.sync_gradients = bool(updated)
        if updated:
            self.make_up()
        log.debug("window closed after call %d: %s", self.window.micro_step, closing)
        if updated:
            self.buffers.after_boundary(captured)
        self.integrity.over()
        if updated:
            with self.integrity.among_ranks(alone=self._line.group is None):
                self.drift.updated(self._line, self.window.optimizer_step, captured.reduced)
            self.integrity.over()
        if not updated and meeting.pending:
            warn_user(
                "a window closed without a single term on any rank (skipped, not finite, or of zero weight): no update"
            )

    def _close_apart(
        self, captured: CapturedStep, meeting: Meeting, results: list[Any]
    ) -> frozenset[int]:
        """The tail for all that the ranks' windows hold; returns the parts that it updated."""
        runs = bool(results)
        held = self._line.names(
            [
                f"{part} {name}"
                for part in meeting.closing
                for name in self.accumulators.names([part])
            ]
        )
        names = [name.partition(" ")[2] for name in held]
        # At the end of all data every part closes, also one that has just been closed and holds nothing.
        closing = frozenset(int(name.partition(" ")[0]) for name in held) or meeting.closing
        whole = meeting.uniform and set(names) == set(captured.names_of(closing))
        target = self.catalogue.for_parameters(captured, names, closing) if names else captured
        ready = target is not None and not (runs and any(captured.regions.stages.values()))
        rows = self._line.gather([float(ready), *self._weights(captured, self.window)])
        if target is None or not all(row[0] for row in rows):
            raise no_common_tail([rank for rank, row in enumerate(rows) if not row[0]])
        totals = totals_of(row[1:] for row in rows)
        updated = frozenset(part for part in closing if totals[part] > 0) if names else NONE
        if updated:
            target.host_values = captured.host_values
            given = target.tail(updated, self._divisors(totals), by_name=not whole)
            if runs and target.regions.tail_outputs == captured.regions.tail_outputs:
                # The caller holds these tensors by now: the accumulate program made them, full of NaN.
                for i, value in zip(target.regions.tail_outputs, given, strict=True):
                    results[i].copy_(value)
            for i in captured.regions.late_outputs if runs else ():
                # Computed ahead of this update: no value is better than that of other parameters.
                if results[i] is not None and results[i].is_floating_point():
                    results[i].fill_(torch.nan)
        return updated

    def _close_in_turn(self, eager: EagerStep, meeting: Meeting) -> frozenset[int]:
        """The window of an eager step, without data: one optimizer after the other."""
        numbers = eager.in_turn(meeting.closing)
        updated = [i for i in numbers if self.settle(eager, i, self.window, ready=eager.updates)]
        eager.repeat(updated)
        eager.schedule(updated)
        eager.forget_gradients()
        return frozenset(eager.part_of_optimizer(i) for i in updated)

    def settle(
        self, eager: EagerStep, number: int, after: WindowState, *, ready: bool = True
    ) -> bool:
        """Reduces what the ranks' windows hold for one optimizer of an eager step; says whether it is anything.

        after: the window with this call in it. ready: whether this rank can make the update.
        """
        held, part = eager.held_by(number), eager.part_of_optimizer(number)
        names = self._line.names([n for n in self.accumulators.in_window if n in held])
        rows = self._line.gather([float(ready), *self._weights(eager, after)])
        if names and not all(row[0] for row in rows):
            raise no_call_yet([rank for rank, row in enumerate(rows) if not row[0]])
        totals = totals_of(row[1:] for row in rows)
        if not names or totals[part] <= 0:
            return False
        known = eager.capture.parameters
        self.accumulators.make({name: known[name] for name in names}, known, self.options)
        divisors = self._divisors(totals)
        self.integrity.writes(updates=True)
        eager.leave_out(held.difference(names))
        eager.reduce(names, divisors["ranks", part], divisors["local", part])
        return True

    def keep_company(self, captured: CapturedStep | EagerStep) -> None:
        """Takes part, without data, in the collectives of the other ranks' micro-step."""
        self.buffers.keep_company(captured)
        if self.options.sync_each_batch and isinstance(captured, CapturedStep):
            self.integrity.writes(updates=False)
            captured.take_part()
            self.accumulators.added(captured.names, weighed=captured.weighs)
