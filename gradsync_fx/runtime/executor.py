"""The runtime: one window, its counter, and where the ranks meet.

An accumulate call runs no collective. A window closes in a call, in a slot without data (skip) or after the data
(flush); in all three the ranks tell each other where they stand, and then each of them asks its step to close:

    closing parts -> meet -> Meeting -> step.close (protocol.py) -> end_window

How a step runs is not known here: captured (captured_window.py, captured_step.py) or as it is (the folder eager).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradsync_fx.comm.arrivals import ARRIVALS
from gradsync_fx.comm.collectives import Agreement
from gradsync_fx.comm.drift import Drift
from gradsync_fx.comm.rendezvous import (
    ACCUMULATE,
    BOUNDARY,
    FLUSH,
    Line,
    Meeting,
    Position,
    check_same_kind,
    check_same_layout,
    check_same_window,
    saving,
)
from gradsync_fx.comm.replica_check import check_optimizers, check_replicas, number_of_all
from gradsync_fx.optim.likeness import likeness
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting, shared_options
from gradsync_fx.progress import stage
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.ballot import Ballot
from gradsync_fx.runtime.capture_cache import Catalogue
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.ending import Closed, Ending, weights_summed
from gradsync_fx.runtime.module_buffers import ModuleBuffers
from gradsync_fx.runtime.outcome import Outcome, SettledStates
from gradsync_fx.runtime.protocol import StepProtocol
from gradsync_fx.runtime.update_watch import UpdateWatch
from gradsync_fx.runtime.window import NONE, WindowState
from gradsync_fx.user_lines import warn_user


log = logging.getLogger(__name__)


class Executor:
    """Owns the window: counter, accumulators, steps. Everything that `optimize`'s step offers is asked of it.

    window: where this rank stands. sync_gradients: whether the last call was a boundary. saved: the window that was
    saved or loaded last. discards: windows that were dropped. watch: where any rank has an `on_update`. stop_agreed:
    whether some rank had asked to stop when the ranks met last. deferred: what the latest call left to be done with an
    update. simulated: a number of ranks that are not there; then steps are captured and programs built, and nothing
    runs.
    """

    def __init__(self, options: Options, simulated: int | None = None) -> None:
        self.options = options
        self.simulated = simulated is not None
        self.window = WindowState.fresh(len(options.steps))
        self._synced: bool | None = False
        self._awaited: tuple[StepProtocol, Meeting, Outcome] | None = None
        self._states = SettledStates()
        self.accumulators = Accumulators(len(options.steps))
        self.integrity = Integrity()
        self.catalogue = Catalogue(self.accumulators, self.integrity, simulated)
        self.catalogue.meet_to_save = self.meet_to_save
        self.buffers = ModuleBuffers(self.catalogue)
        self.drift = Drift()
        self.saved: WindowState | None = None
        self.discards = 0
        self.deferred: Sequence[Callable[[], None]] = ()
        self._line, self._begun = Line(None, None), False
        self._agreement = Agreement()
        self._rest: tuple[StepProtocol, Meeting, Callable[[], Closed]] | None = None
        self._ballot: Ballot | None = None  # of the latest meeting
        self._refusals: list[BaseException] = []
        self.watch: UpdateWatch | None = None
        self._stop_asked = self.stop_agreed = False

    @property
    def begun(self) -> bool:
        """Whether the ranks have met, or nothing ever runs."""
        return self._begun or self.simulated

    @property
    def sync_gradients(self) -> bool:
        """Waits for the update where only the device knows whether there was one."""
        if self._synced is None:
            self.settle()
        return bool(self._synced)

    @sync_gradients.setter
    def sync_gradients(self, value: bool) -> None:
        self._synced = value

    def begin(self, step: StepProtocol) -> None:
        """All ranks' first step: from here on they can speak to each other. Made again by the next call if it fails."""
        self.integrity.check("the first call")
        setting = step.setting
        self._line = Line(setting.group, self.options.rank_timeout)
        shared = {n: p for n, p in step.objects.parameters.items() if n not in setting.ignored}
        if setting.group is not None:
            with self.integrity.among_ranks(), stage("comparing parameters with the other ranks"):
                alike = shared_options(setting, self.options)
                updates = self._updates(step)
                check_replicas(self._line, alike, shared, setting.shared_buffers, updates)
        self.watch = UpdateWatch.wanted(self._line, self.options, setting, shared.values())
        self.buffers.first(step)
        self.drift.begin(shared)
        self._begun = True
        self.integrity.over()

    def _updates(self, step: StepProtocol) -> list[str]:
        """What has to be alike on all ranks of the optimizers, and of what they do."""
        known, ignored = step.objects.parameters, step.setting.ignored
        names = {id(p): name for name, p in known.items() if name not in ignored}
        held = [line for o in step.objects.optimizers for line in likeness(o, names)]
        return [*held, *step.updates_told(self.all_parts)]

    @property
    def setting(self) -> Setting | None:
        """The ranks and their group; None before the first step."""
        steps = self.catalogue.steps
        return steps[0].setting if steps and self._begun else None

    @property
    def all_parts(self) -> frozenset[int]:
        return frozenset(range(len(self.window.parts)))

    def closing(self, step: StepProtocol) -> frozenset[int]:
        """The parts that the next call closes."""
        if self.options.manual:
            return self.all_parts if step.updates else NONE
        return self.window.closing(self.options.steps)

    @property
    def talks(self) -> bool:
        """Whether the step that ran last has collectives of its own in it."""
        latest = self.catalogue.latest
        return latest is not None and latest.collectives.each_call > 0

    def absent(self) -> list[int]:
        """The ranks that are missing in a program, where that is known."""
        return self._line.absent(behind=True)

    def place(self) -> str:
        """Where this rank's next call stands among the ranks, for people."""
        window = self.window
        return self._line.place(window.pending + 1, max(self.options.steps), window.optimizer_step)

    def next_place(self) -> str:
        """Where the next call stands, for people."""
        return f"micro-step {self.window.pending + 1}/{max(self.options.steps) or '?'}"

    def start_call(self) -> None:
        """A call that runs a program begins: nothing is left of the one before."""
        self.deferred, self.sync_gradients = (), False
        self._rest = None  # of a call that was cut off, and has been dropped since

    def end_call(self, after: WindowState) -> None:
        """A call, or a slot without data, that closed nothing is over."""
        self.window, self.sync_gradients = after, False
        self.integrity.over()

    def meet(
        self,
        step: StepProtocol,
        kind: int,
        closing: frozenset[int],
        after: WindowState,
        *,
        runs: bool,
    ) -> Meeting:
        """Tells the other ranks where this one stands, and learns it of them."""
        summed = max(part.summed for part in after.parts)
        masks = runs and bool(closing) and step.masks(self.accumulators, closing, summed)
        held = self.accumulators
        # A program that masks by itself is not waited for: its ranks may close without the weights, then.
        in_window = held.given() if masks else held.read_in_window()
        unread = (0.0,) * len(after.parts)
        closes = self.all_parts if kind == FLUSH else closing
        mine = Position(
            kind=kind,
            runs=runs,
            k=max(self.options.steps),
            pending=after.pending,
            closing=sum(1 << part for part in closing),
            optimizer_step=self.window.optimizer_step,
            layout=step.layout_for(in_window),
            certain=not masks and step.certain(in_window, closing),
            discards=self.discards,
            settled=step.settled,
            collectives=step.collectives.number,
            bound=step.collectives.bound(closes=bool(closing)) if runs else 0,
            fed=summed,
            buffers=self.buffers.number(),
            masks=masks,
            stop=self._stop_asked,
            weights=unread
            if masks
            else held.weights_read()
            if step.weighs
            else weights_summed(after, held, weighs=False),
            updates=tuple(
                number_of_all(step.updates_told([part])) if part in closes else 0.0
                for part in range(len(after.parts))
            ),
        )
        if closes and self.watch is not None:
            self.watch.closing(step)
        with self.integrity.among_ranks(alone=self._line.group is None):
            self.drift.compare(self._line)
            meeting = self._line.meet(mine)
            self.stop_agreed |= meeting.kind == BOUNDARY and any(p.stop for p in meeting.ranks)
            commit = self.options.commit
            self._ballot = None if commit is None else Ballot(commit, self._line)
            check_same_kind(meeting)
            self._agreement.check(self._line, meeting, step.collectives)
            check_same_window(meeting)
            if meeting.uniform:
                for part in meeting.closing:
                    numbers = [p.updates[part] for p in meeting.ranks]
                    check_optimizers(self._line, numbers, lambda: self._updates(step))
            self.buffers.follow(self._line, meeting)
            if meeting.someone_runs and self.options.sync_each_batch:
                check_same_layout(meeting)
        return meeting

    def meet_to_save(self) -> None:
        """Lets all ranks come together to gather an optimizer's state. Raises where some are elsewhere."""
        self.settle_all()
        window = self.window
        line = Line(self.catalogue.captures[0].setting.group, self.options.rank_timeout)
        self.drift.compare(line)
        mine = saving(
            max(self.options.steps), window.pending, window.optimizer_step, len(window.parts)
        )
        check_same_kind(line.meet(mine))

    def ask_to_stop(self) -> None:
        """The next meeting tells all ranks. For signal handlers, too: it only sets a flag."""
        self._stop_asked = True

    def ending(self, meeting: Meeting, after: WindowState) -> Ending:
        """What a step is given to end the window in which these ranks met."""
        world = self.setting.world if self.setting is not None else 1
        return Ending(
            meeting,
            after,
            self._line,
            world,
            self.options,
            self.accumulators,
            self.integrity,
            self._ballot,
        )

    def close(
        self, step: StepProtocol, kind: int, closing: frozenset[int], args: list[Any] | None
    ) -> tuple[Sequence[Any], Meeting]:
        """Ends the window of the closing parts together with all ranks. args: of the call; None without data."""
        runs = args is not None
        self.settle()
        self.accumulators.fold(but=step.early_sums if runs else None)
        after = self.window if kind == FLUSH else self.window.called(summed=runs)
        meeting = self.meet(step, kind, closing, after, runs=runs)
        if runs:
            self.buffers.before(step)
        elif meeting.someone_runs:
            self.participate(step)
        if meeting.kind == ACCUMULATE:
            self.integrity.over()
            return [], meeting
        closed = step.close(self.ending(meeting, after), args)
        self.window = after
        if closed.rest is None:
            self.end_window(step, meeting, closed)
        else:
            self._rest = (step, meeting, closed.rest)
            if not runs:
                self.finish()
        return closed.results, meeting

    def finish(self) -> None:
        """The second half of a window's end: outside of the traced call, which it may trace anew."""
        if self._rest is None:
            return
        (step, meeting, rest), self._rest = self._rest, None
        self.end_window(step, meeting, rest())

    def make_up(self) -> None:
        """What waited for an update: numbers that the latest call would have changed."""
        deferred, self.deferred = self.deferred, ()
        for do in deferred:
            do()

    def end_window(self, step: StepProtocol, meeting: Meeting, closed: Closed) -> None:
        """The closing parts start anew, whether they were updated or had nothing to update with."""
        closing = meeting.closing
        self.accumulators.clear(closing - closed.reset)
        self.accumulators.closed(closing)
        self.window = self.window.closed(closing)
        updated = bool(closed.updated) if closed.outcome is None else None
        if self.watch is not None:
            self.watch.closed(step, meeting, self.window.micro_step)
        self._count(updated)
        log.debug("window closed after call %d: %s", self.window.micro_step, closing)
        if meeting.pending:
            self.buffers.after_boundary(step)
        self.integrity.over()
        if closed.outcome is None:
            self._follow_up(step, meeting, updated=bool(updated))
            with self.integrity.among_ranks(alone=self._line.group is None):
                self.drift.compare(self._line, if_known=True)
            self.integrity.over()
        else:
            self._awaited = (step, meeting, closed.outcome)
            self._states.watch(step.objects.optimizers, self.settle)
        if self._ballot is not None and self._ballot.failure is not None:
            self._refusals.append(self._ballot.failure)

    def raise_refusal(self) -> None:
        """Raises what `commit` raised on this rank, when a call, or all that a flush closes, is over."""
        if self._refusals:
            first, *_ = self._refusals
            self._refusals = []
            raise first

    def summed_in_place(self) -> dict[str, torch.Tensor]:
        """The running sums, to be looked at from here on: terms go into them with every call."""
        self.accumulators.fold()
        for step in self.catalogue.captures:
            step.programs.sum_in_accumulators()
        return self.accumulators.sums

    def settle_all(self) -> None:
        """As `settle`; and waits until parameters are in place."""
        self.settle()
        ARRIVALS.check()
        ARRIVALS.settle()

    def settle(self) -> None:
        """Learns whether the last window made an update, where only the device knew; waits for it, not for more.

        It tells other ranks nothing: one rank may ask alone, and one may let go of its step before the others.
        """
        if self._awaited is None:
            return
        (step, meeting, outcome), self._awaited = self._awaited, None
        updated, asked = outcome.counted(), self._synced is None
        self._count(updated)
        if not asked:  # a call has begun since
            self._synced = False
        self._follow_up(step, meeting, updated=updated)

    def _count(self, updated: bool | None) -> None:
        """updated: None where it is not known yet."""
        self._synced = updated
        if updated:
            self.window = self.window.updated()
            self.make_up()

    def _follow_up(self, step: StepProtocol, meeting: Meeting, *, updated: bool) -> None:
        """What is looked at after an update, or said of a window without one."""
        if self.watch is not None:
            self.watch.counted(self.window.optimizer_step, updated=updated)
        if updated:
            self.drift.updated(self._line, self.window.optimizer_step, step.reduced)
        elif self._ballot is not None and self._ballot.refused:
            log.info("the update of %s was refused by commit", self.place())
        elif meeting.pending:
            warn_user(
                "a window closed without a single term on any rank (skipped, not finite, or of zero weight): no update"
            )

    def participate(self, step: StepProtocol) -> None:
        """Takes part, without data, in the collectives of the other ranks' micro-step."""
        self.buffers.participate(step)
        step.participate(self.accumulators, self.integrity)
