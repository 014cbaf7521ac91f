"""`CapturedStep`: one captured step at run time, made of its facts, its program cache and its runner.

    facts (captured_facts.py)      fixed at the capture
    programs (program_cache.py)    compiled on first need
    runner (program_runner.py)     runs one of them

A window of it ends, with all ranks at one place, in one of two ways. Each rank

    runs the boundary program (or the tail program, without data)     if all ranks have the same gradients to reduce
                                                                      and each has a term that certainly counts,
                                                                      and either all of them have data or none
    runs the boundary program, which masks its update         if only the device knows whether any term counts, and all
                                                              of a rank's micro-steps gave the same gradients terms
    runs the accumulate program, then the tail for the union of what  otherwise: branches that differ, or weights that
    the ranks' windows hold, or makes no update if that is nothing    may all be zero; a rank without data among others,
                                                                      as an update compiled into another program
                                                                      may round otherwise
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.comm.host_copy import HostCopy
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.replica_check import alike_updates
from gradsync_fx.ir.deferral import check_deferrable
from gradsync_fx.ir.program import Kind
from gradsync_fx.lowering.lower import as_it_is
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting
from gradsync_fx.runtime.accumulators import Accumulators, EarlySums
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.divisors import Divisors, totals_of
from gradsync_fx.runtime.ending import Closed, Ending
from gradsync_fx.runtime.host_calls import HostCalls
from gradsync_fx.runtime.outcome import Outcome
from gradsync_fx.runtime.participate import take_part
from gradsync_fx.runtime.program_cache import CompiledProgram, ProgramCache
from gradsync_fx.runtime.program_runner import ProgramRunner
from gradsync_fx.runtime.refusals import no_common_tail
from gradsync_fx.runtime.sharing import updates_told
from gradsync_fx.runtime.window import NONE


log = logging.getLogger(__name__)
Covering = Callable[["CapturedStep", Collection[str], Collection[int]], "CapturedStep | None"]


class CapturedStep:
    """A micro-step that closes some parts of the window, or a tail, over the flat inputs of the step.

    covering: finds a step whose tail updates exactly these parameters of these parts; this one, if it does.
    """

    def __init__(
        self,
        facts: CapturedFacts,
        accumulators: dict[str, torch.Tensor],
        weights: dict[int, torch.Tensor],
        integrity: Integrity,
        covering: Covering,
    ) -> None:
        self.facts, self._covering = facts, covering
        self.programs = ProgramCache(facts, accumulators, weights)
        self.runner = ProgramRunner(facts, self.programs, integrity)
        self.host = HostCalls(facts, self.programs.bindings)
        self._tail_data: dict[int, Any] = {}
        self._weight_number = -1

    # Of protocol.py: what it is.

    @property
    def objects(self) -> Capture:
        return self.facts.capture

    @property
    def setting(self) -> Setting:
        return self.facts.setting

    @property
    def collectives(self) -> OwnCollectives:
        return self.facts.collectives

    @property
    def updates(self) -> bool:
        return self.facts.updates

    @property
    def can_close(self) -> bool:
        """Whether its tail can close a window without data."""
        return self.facts.updates

    @property
    def weighs(self) -> bool:
        return self.facts.weighs

    @property
    def early_sums(self) -> EarlySums:
        return self.runner.held

    @property
    def reduced(self) -> frozenset[str]:
        return self.facts.reduced

    @property
    def speaks_in_every_call(self) -> bool:
        return self.facts.speaks_in_every_call

    @property
    def waited(self) -> tuple[int, float]:
        return self.runner.buckets.waited

    @property
    def norms(self) -> list[torch.Tensor]:
        known = self.host.values
        return [known[i] for i in self.facts.capture.norms if i in known]

    def take_weight(self) -> torch.Tensor | None:
        weighing = self.facts.weighing
        if weighing is None or not weighing.finite:
            return None
        return self.host.values.pop(self._weight_number, None)

    def bytes_sent(self, closing: Collection[int]) -> int:
        return self.facts.bytes_sent(closing)

    def layout_for(self, in_window: Collection[str]) -> int:
        return self.facts.layout_for(in_window)

    def certain(self, in_window: Collection[str], closing: Collection[int]) -> bool:
        return self.facts.certain(in_window, closing)

    def updates_told(self, parts: Collection[int]) -> list[str]:
        bindings = self.programs.bindings.values()
        return updates_told(self.facts, (b for b in bindings if b.part in parts))

    def masks(self, accumulators: Accumulators, closing: frozenset[int], summed: int) -> bool:
        """Where each of its gradients has a term of every micro-step, so that all of them count or none does; and
        nothing happens on the host that could not be taken back."""
        return (
            self.facts.masks
            and not self.facts.capture.host_calls
            and accumulators.in_every(self.facts.names, summed - 1)
            and self.programs.masked(closing) is not None
        )

    # Of protocol.py: what it does.

    def close(self, ending: Ending, args: list[Any] | None) -> Closed:
        """See the module's text."""
        closing, meeting = ending.meeting.closing, ending.meeting
        if meeting.masked and args is not None:
            return self._close_masked(ending, args)
        totals = totals_of(p.weights for p in meeting.ranks)
        if (
            meeting.certain
            and all(totals[part] > 0 for part in closing)
            and (meeting.all_or_none_run or as_it_is(self.facts.options))
        ):
            divisors = ending.divisors(totals)
            with self.side_by_side(ending.line, settled=all(p.settled for p in meeting.ranks)):
                if args is None:
                    self.tail(closing, divisors, ending.counts)
                    return Closed([], *_updated(ending, closing))
                results = self.micro_step(args, closing, divisors, ending.counts)
            ending.accumulators.added(self.facts.names, weighed=self.weighs)
            return Closed(results, *_updated(ending, closing))
        results = []
        if args is not None:
            results = self.micro_step(args, NONE, {})
            ending.accumulators.added(self.facts.names, weighed=self.weighs)
        return Closed(results, rest=lambda: self._close_apart(ending, results))

    def _close_masked(self, ending: Ending, args: list[Any]) -> Closed:
        """One program for everything, also for a window in which nothing counts: the host learns of that later."""
        closing = ending.meeting.closing
        divisors = ending.divisors([1.0] * len(ending.after.parts))  # weights are the program's
        with self.side_by_side(ending.line, settled=all(p.settled for p in ending.meeting.ranks)):
            results = self.micro_step(args, closing, divisors)
        assert self.runner.masked is not None
        weight, put_back = self.runner.masked
        return Closed(results, closing, closing, Outcome(HostCopy(weight), put_back))

    def _close_apart(self, ending: Ending, results: list[Any]) -> Closed:
        """The tail for all that the ranks' windows hold."""
        runs, sums = bool(results), ending.accumulators
        sums.fold()
        held = ending.line.names(
            [f"{part} {name}" for part in ending.meeting.closing for name in sums.names([part])]
        )
        names = [name.partition(" ")[2] for name in held]
        # At the end of all data every part closes, also one that has just been closed and holds nothing.
        parts = {int(name.partition(" ")[0]) for name in held}
        closing = frozenset(parts) or ending.meeting.closing
        whole = ending.meeting.uniform and set(names) == set(self.facts.names_of(closing))
        target = self._covering(self, names, closing) if names else self
        ready = target is not None and not (runs and any(self.facts.regions.stages.values()))
        totals, late = ending.totals(ready=ready, weighs=self.weighs)
        if target is None or late:
            raise no_common_tail(late)
        if names and target.facts.shares:
            alike_updates(ending.line, target.updates_told(closing))
        updated = frozenset(part for part in closing if totals[part] > 0) if names else NONE
        if updated:
            target.host.values = self.host.values
            divisors = ending.divisors(totals)
            given = target.tail(updated, divisors, ending.counts, by_name=not whole)
            self._mend(results, target, given)
        return Closed(results, *_updated(ending, updated))

    def _mend(self, results: list[Any], target: CapturedStep, given: list[Any]) -> None:
        """Puts what the tail of `target` gave into a call's results: the caller holds these tensors by now.

        The accumulate program made them, full of NaN.
        """
        if not results:
            return
        if target.facts.regions.tail_outputs == self.facts.regions.tail_outputs:
            for i, value in zip(target.facts.regions.tail_outputs, given, strict=True):
                results[i].copy_(value)
        for i in self.facts.regions.late_outputs:
            # Computed before this update: no value is better than that of other parameters.
            if results[i] is not None and results[i].is_floating_point():
                results[i].fill_(torch.nan)

    def participate(self, accumulators: Accumulators, integrity: Integrity) -> None:
        """Zeros into the reductions of the other ranks' accumulate call; what they sum comes in here, too."""
        if self.facts.options.sync_each_batch:
            integrity.writes(updates=False)
            take_part(self.programs.plan)
            accumulators.added(self.facts.names, weighed=self.weighs)

    def change_steps(self, options: Options) -> None:
        """Raises `ReadBeforeBoundaryError` where a longer window cannot put off what the step does."""
        self.programs.change_steps(options.steps)
        if options.accumulates:
            check_deferrable(self.facts.capture.step, self.facts.regions)

    # Its programs at work.

    def micro_step(
        self,
        args: list[Any],
        closing: frozenset[int],
        divisors: Divisors,
        counts: Callable[[], bool] = lambda: True,
    ) -> list[Any]:
        """One micro-step: adds to the parts that stay open, reduces and updates those that close.

        counts: whether the update does; asked where the user decides that.
        """
        compiled = self.programs.compiled(closing)
        if closing and not compiled.built.kept.deferred:
            self.early_sums.fold()
        self.remember(args)
        numbers = range(compiled.program.host_values)
        self._weight_number = len(numbers) - 1
        return self._run(compiled, args, divisors, counts, numbers, closing)

    def _run(
        self,
        compiled: CompiledProgram,
        args: list[Any],
        divisors: Divisors,
        counts: Callable[[], bool],
        numbers: Collection[int],
        closing: frozenset[int],
    ) -> list[Any]:
        """A program, and with its update the host's calls. numbers: of the values for these that it gives."""
        results = self.runner.run(compiled, args, divisors, counts)
        made = not compiled.program.voted or counts()
        self.host.take(compiled.program, results, numbers, made=made)
        if made:
            self.host.make(closing)
        return results

    def remember(self, args: list[Any]) -> None:
        """The user's own tensors that a tail reads and writes."""
        self._tail_data = {i: args[i] for i in self.facts.regions.tail_data}

    def tail(
        self,
        closing: frozenset[int],
        divisors: Divisors,
        counts: Callable[[], bool] = lambda: True,
        *,
        by_name: bool = False,
    ) -> list[Any]:
        """Reduction and update of what is summed already. Returns the outputs `regions.tail_outputs`."""
        compiled = self.programs.compiled(closing, tail=True, by_name=by_name)
        capture = self.facts.capture
        tensors = {**capture.buffers, **capture.parameters}
        args = [
            self._tail_data.get(i) if slot.kind is Kind.DATA else tensors.get(slot.name)
            for i, slot in enumerate(capture.step.slots)
        ]
        numbers = self.facts.regions.boundary_host
        return self._run(compiled, args, divisors, counts, numbers, closing)

    @property
    def settled(self) -> bool:
        """Whether it knows what it shares with other ranks, or has nothing to share."""
        return not self.facts.shareable or self.runner.buckets.settled

    @contextmanager
    def side_by_side(self, line: Line, *, settled: bool) -> Iterator[None]:
        """For a program that all ranks run: the buckets that they share in memory are added up there.

        settled: whether all ranks know which ones; if not, all ranks ask.
        """
        if line.group is not None and not settled:
            asked = [self.runner.sums_of(bucket) for bucket in self.facts.shareable]
            shared = self.runner.buckets.share(line, asked, self.facts.gathered_in_memory)
            log.info("%d of %d buckets are shared in memory", shared, len(asked))
        with self.runner.buckets.in_use(together=True):
            yield


def _updated(ending: Ending, parts: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """What a program that closed these parts has updated, and set to zero: nothing where that was refused."""
    made = parts if not parts or ending.counts() else NONE
    return made, made
