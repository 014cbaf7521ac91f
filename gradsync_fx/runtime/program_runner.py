"""Runs one compiled program of a captured step: binds its inputs, and puts into optimizers what it leaves."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, cast

import torch
from torch.profiler import record_function

from gradsync_fx._torch import profiler_enabled
from gradsync_fx.comm.arrivals import ARRIVALS
from gradsync_fx.comm.flat_bucket import FlatBuckets
from gradsync_fx.ir.program import Kind
from gradsync_fx.lowering.in_halves import InTwo
from gradsync_fx.lowering.lower import as_it_is
from gradsync_fx.optim.opaque import warn_of
from gradsync_fx.planning.plan import Bucket
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.divisors import Divisors
from gradsync_fx.runtime.program_cache import CompiledProgram, ProgramCache
from gradsync_fx.runtime.program_inputs import HeldTensors
from gradsync_fx.runtime.prologue import HeldForWindow
from gradsync_fx.runtime.settling import watch_reads


class ProgramRunner:
    """measured: calls and seconds of each program, by its name. masked: of the window that a masked program closed last
    the weight, on its device, and what puts back the numbers that the host counted with its update."""

    def __init__(self, facts: CapturedFacts, programs: ProgramCache, integrity: Integrity) -> None:
        self._facts, self._programs, self._integrity = facts, programs, integrity
        self.held = HeldForWindow(facts, programs, integrity, self.run_alone)
        self.measured: dict[str, tuple[int, float]] = {}
        self.masked: tuple[torch.Tensor, Callable[[], None]] | None = None
        self._warned: set[str] = set()

    @cached_property
    def buckets(self) -> FlatBuckets:
        """The step's buckets at run time, in both orders. By the first run each of its leaves has an accumulator."""
        known = (*self._facts.buckets, *self._facts.buckets_by_name)
        held = self._programs.plan.accumulators
        return FlatBuckets(map(self.sums_of, known), {t.data_ptr(): n for n, t in held.items()})

    def sums_of(self, bucket: Bucket) -> list[torch.Tensor]:
        """The running sums of a bucket, in its order."""
        leaves, sums = self._facts.capture.step.leaves, self._programs.plan.accumulators
        return [sums[leaves[i].name] for i in bucket.leaves]

    def run(
        self,
        compiled: CompiledProgram,
        args: list[Any],
        divisors: Divisors,
        counts: Callable[[], bool] = lambda: True,
    ) -> list[Any]:
        """Returns what the program does, without the optimizer state that it created. args: the step's own inputs.

        counts: whether its update does; asked, where the program waits for that, when its reductions have started.
        """
        program, updates, opaque = compiled.program, compiled.built.updates, compiled.built.opaque
        if not compiled.waits_for_parameters:
            ARRIVALS.settle()
        if compiled.built.kept.held:
            self.held.ready(args, sums=bool(compiled.built.kept.deferred))
        held = self._held(compiled, divisors)
        start = time.perf_counter()
        inputs = self._inputs(compiled, args, held)
        first = None
        if as_it_is(self._facts.options) and program.first_written is not None:
            first = inputs[program.first_written]
            version = first._version
        warn_of(opaque, self._warned)
        self._integrity.writes(updates=bool(updates or opaque))
        try:
            with (
                torch.no_grad(),
                self._named_for_profiles(program.name),
                self.buckets.in_use(),
            ):
                results, updated = self._run(compiled, inputs, counts)
        except BaseException:
            if first is not None and first._version == version:
                self._integrity.spared()  # an assert of the step's own, say
            raise
        calls, seconds = self.measured.get(program.name, (0, 0.0))
        self.measured[program.name] = (calls + 1, seconds + time.perf_counter() - start)
        if program.masked:
            self.masked = (results.pop(), self._numbers_held(compiled))
        self._commit(compiled, results, updated=updated)
        watch_reads(self._facts.capture.holders)
        return results

    def run_alone(self, compiled: CompiledProgram, args: Sequence[Any]) -> None:
        """A program of a window without a micro-step or an update: it writes what is held, or the sums."""
        inputs = self._inputs(compiled, args, {})
        with torch.no_grad(), self._named_for_profiles(compiled.program.name):
            compiled.run(inputs)

    def _named_for_profiles(self, program: str) -> AbstractContextManager[Any]:
        """A stretch with the step's and the program's name; nothing where nobody looks."""
        if not profiler_enabled():
            return nullcontext()
        return record_function(f"gradsync_fx {self._facts.capture.name}: {program}")

    @staticmethod
    def _run(
        compiled: CompiledProgram, inputs: list[Any], counts: Callable[[], bool]
    ) -> tuple[list[Any], bool]:
        """The program's results, and whether it made its update."""
        if not compiled.program.voted:
            return list(compiled.run(inputs)), True
        run = cast("InTwo", compiled.run)
        begun = run.start(inputs)
        updated = counts()
        return list(run.finish(begun) if updated else run.refuse(begun)), updated

    def _numbers_held(self, compiled: CompiledProgram) -> Callable[[], None]:
        """Puts back the numbers that `_commit` will change."""
        bindings, updates = self._programs.bindings, compiled.built.updates
        back = [bindings[key].numbers_held(update) for key, update in updates.items()]

        def put_back() -> None:
            for one in back:
                one()

        return put_back

    def _held(self, compiled: CompiledProgram, divisors: Divisors) -> HeldTensors:
        """Divisors of the window, and what the optimizers hold."""
        held: HeldTensors = {
            (Kind.SCALAR, ("divisor", *which)): torch.tensor(value, dtype=torch.float64)
            for which, value in divisors.items()
        }
        for key, update in compiled.built.updates.items():
            binding = self._programs.bindings[key]
            for i, tensor in enumerate(binding.state_tensors(update)):
                held[Kind.STATE, (key, i)] = tensor
            for i, scalar in enumerate(binding.scalars(update)):
                held[Kind.SCALAR, (key, i)] = scalar
        return held

    def _inputs(
        self, compiled: CompiledProgram, args: Sequence[Any], held: HeldTensors
    ) -> list[Any]:
        plan, early = self._programs.plan, self.held.sums
        sums = {**plan.accumulators, **early} if early else plan.accumulators
        return compiled.inputs.bind(args, sums, plan.weights, self.held.values, held)

    def _commit(self, compiled: CompiledProgram, results: list[Any], *, updated: bool) -> None:
        """Takes created state off the end of the results, where the programs put it, into the optimizers."""
        updates = compiled.built.updates
        for key in reversed(list(updates)):
            count = len(updates[key].created)
            created = results[len(results) - count :]
            del results[len(results) - count :]
            if updated:
                self._programs.bindings[key].commit(updates[key], created)
