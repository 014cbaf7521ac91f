"""One captured step at work: what is known of it, its programs, and what runs them.

facts (captured_facts.py)      fixed at the capture
programs (program_cache.py)    compiled on first need
runner (program_runner.py)     runs one of them
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.comm.flat_buffers import joined
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.shm_all_reduce import SharedBuckets, find_shared
from gradsync_fx.ir.program import Kind
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.divisors import Divisors
from gradsync_fx.runtime.host_calls import HostCalls
from gradsync_fx.runtime.participate import take_part
from gradsync_fx.runtime.program_cache import ProgramCache
from gradsync_fx.runtime.program_runner import ProgramRunner


log = logging.getLogger(__name__)


class CapturedStep:
    """A micro-step that closes some parts of the window, or a tail, over the flat inputs of the step."""

    def __init__(
        self,
        facts: CapturedFacts,
        accumulators: dict[str, torch.Tensor],
        weights: dict[int, torch.Tensor],
        integrity: Integrity,
    ) -> None:
        self.facts = facts
        self.programs = ProgramCache(facts, accumulators, weights)
        self.runner = ProgramRunner(facts, self.programs, integrity)
        self.host = HostCalls(facts, self.programs.bindings)
        self._tail_data: dict[int, Any] = {}
        self._shared: SharedBuckets | None = None

    # What the runtime asks of an eager step, too.

    @property
    def capture(self) -> Capture:
        return self.facts.capture

    @property
    def options(self) -> Options:
        return self.facts.options

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
    def reduced(self) -> frozenset[str]:
        return self.facts.reduced

    @property
    def speaks_in_every_call(self) -> bool:
        return self.facts.speaks_in_every_call

    def layout_for(self, in_window: Collection[str]) -> int:
        return self.facts.layout_for(in_window)

    def certain(self, in_window: Collection[str], closing: Collection[int]) -> bool:
        return self.facts.certain(in_window, closing)

    # What it does.

    def micro_step(self, args: list[Any], closing: frozenset[int], divisors: Divisors) -> list[Any]:
        """One micro-step: adds to the parts that stay open, reduces and updates those that close."""
        compiled = self.programs.compiled(closing)
        self.remember(args)
        results = self.runner.run(compiled, args, divisors)
        self.host.take(compiled.program, results, range(compiled.program.host_values))
        self.host.make(closing)
        return results

    def remember(self, args: list[Any]) -> None:
        """The user's own tensors that a tail reads and writes."""
        self._tail_data = {i: args[i] for i in self.facts.regions.tail_data}

    def tail(
        self, closing: frozenset[int], divisors: Divisors, *, by_name: bool = False
    ) -> list[Any]:
        """Reduction and update of what is summed already. Returns the outputs `regions.tail_outputs`."""
        compiled = self.programs.compiled(closing, tail=True, by_name=by_name)
        capture = self.facts.capture
        tensors = {**capture.buffers, **capture.parameters}
        args = [
            self._tail_data.get(i) if slot.kind is Kind.DATA else tensors.get(slot.name)
            for i, slot in enumerate(capture.step.slots)
        ]
        results = self.runner.run(compiled, args, divisors)
        self.host.take(compiled.program, results, self.facts.regions.boundary_host)
        self.host.make(closing)
        return results

    def take_part(self) -> None:
        """Zeros into the reductions of the other ranks' accumulate call; what they sum comes in here, too."""
        take_part(self.programs.plan)

    @property
    def settled(self) -> bool:
        """Whether it knows what it shares with other ranks, or has nothing to share."""
        return self._shared is not None or not self.facts.shareable

    @contextmanager
    def side_by_side(self, line: Line, *, settled: bool) -> Iterator[None]:
        """For a program that all ranks run: the buckets that they share in memory are added up there.

        settled: whether all ranks know which ones; if not, all ranks ask.
        """
        if line.group is not None and not settled:
            leaves, sums = self.facts.capture.step.leaves, self.programs.plan.accumulators
            flats = [joined([sums[leaves[i].name] for i in b.leaves]) for b in self.facts.shareable]
            self._shared = find_shared(line, flats)
            log.info("%d of %d buckets are shared in memory", len(self._shared), len(flats))
        with nullcontext() if self._shared is None else self._shared.in_use():
            yield
