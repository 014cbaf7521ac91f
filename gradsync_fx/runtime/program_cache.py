"""The programs of one captured step, by key: built and compiled on first need, and kept with what they were made of.

    closing parts, tail or not, the updates as they are traced now -> key -> program -> compiled program

An optimizer whose structure changes is traced anew, and so asks for other programs; the earlier ones stay, as flags are
toggled back and forth.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx._torch import compile_lock
from gradsync_fx.comm.liveness import compiling
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Program
from gradsync_fx.lowering.in_stages import in_stages
from gradsync_fx.lowering.kernels_together import (
    interrupted,
    kernels_later,
    kernels_on_their_way,
    wait_for_kernels,
)
from gradsync_fx.lowering.lower import Compiled, decompositions, is_rewritten, lower
from gradsync_fx.lowering.torch_trace import add_to_trace
from gradsync_fx.optim.binding import Binding, left_as_they_are
from gradsync_fx.optim.opaque import Opaque
from gradsync_fx.optim.shares import refuse_divided, refuse_opaque, shares_of
from gradsync_fx.optim.update import Update
from gradsync_fx.passes import FOLD, PROLOGUE, build, build_for_window
from gradsync_fx.passes.base import Pass
from gradsync_fx.passes.update import update_key
from gradsync_fx.planning.invariants import find_invariants, with_early_sums
from gradsync_fx.planning.kept import NOTHING, Invariants
from gradsync_fx.planning.plan import Plan
from gradsync_fx.progress import stage
from gradsync_fx.runtime.artifact import looked_up
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.program_inputs import ProgramInputs
from gradsync_fx.runtime.sharing import pieces_of
from gradsync_fx.runtime.window import NONE


log = logging.getLogger(__name__)
_UNKNOWN = (
    2  # micro-steps of a window whose length only the step knows: the fewest that are several
)


@dataclass(frozen=True, slots=True)
class BuiltProgram:
    """A program before lowering. updates, opaque: those that close in it, by `update_key`: what was traced for it, and
    what runs as it is. kept: what it reads of what a window computes once."""

    program: Program
    updates: Mapping[str, Update]
    opaque: Mapping[str, Opaque]
    kept: Invariants = NOTHING

    @property
    def reads_held(self) -> bool:
        """Whether it reads what the prologue computes, or adds to what the fold hands on."""
        return bool(self.kept.held)


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A program that can run. run: takes the list of its inputs, and returns its outputs. inputs: puts that together.
    waits_for_parameters: on their way, where it reads them; otherwise all have to be there."""

    built: BuiltProgram
    run: Compiled
    inputs: ProgramInputs
    waits_for_parameters: bool

    @property
    def program(self) -> Program:
        return self.built.program


class ProgramCache:
    """Builds and compiles for one captured step.

    plan: what its programs have in common, with nothing closing. bindings: its updates, by `update_key`. by_name: the
    latest program of each name. compile_seconds: by name. journal: what the passes did.
    """

    def __init__(
        self,
        facts: CapturedFacts,
        accumulators: dict[str, torch.Tensor],
        weights: dict[int, torch.Tensor],
    ) -> None:
        self._facts = facts
        self.plan = Plan(
            step=facts.capture.step,
            regions=facts.regions,
            buckets=facts.buckets,
            part_of_leaf=facts.part_of_leaf,
            part_of_update=facts.part_of_update,
            closing=NONE,
            accumulators=accumulators,
            weights=weights,
            weighing=facts.weighing,
            group=facts.setting.reduced_over,
            world=facts.setting.world,
            updates={},
            opaque={},
            names={id(p): name for name, p in facts.capture.parameters.items()},
            state_tensors={},
            wire_dtype=facts.setting.wire_dtype,
            sync_each_batch=facts.options.sync_each_batch,
            rank=facts.setting.rank,
            arriving=facts.arriving,
            beside=facts.shares and bool(facts.shareable),
        )
        self.bindings = _bind(facts)
        self._divides = False
        self._kept: Invariants | None = None
        self._kept_key: tuple[str, ...] = ()
        self._steps, self._sums_early = facts.options.steps, True
        self.journal = Journal()
        self.by_name: dict[str, Program] = {}
        self.compile_seconds: dict[str, float] = {}
        self._built: dict[tuple[Any, ...], BuiltProgram] = {}
        self._compiled: dict[tuple[Any, ...], CompiledProgram] = {}
        self._updates: dict[str, Compiled] = {}

    def __len__(self) -> int:
        """Programs compiled so far."""
        return len(self._compiled)

    def compiled(
        self, closing: frozenset[int], *, tail: bool = False, by_name: bool = False
    ) -> CompiledProgram:
        """The program for the optimizers as they are now, compiled. by_name: with the buckets in the order of names."""
        if interrupted():
            with compile_lock:
                wait_for_kernels()
        key, traced = self._select(closing, tail, by_name)
        if key not in self._compiled:
            try:
                found = self._compile(key, lambda: self._build(key, traced))
            except Exception as failure:
                if left_as_they_are(self.bindings.values(), failure):
                    return self.compiled(closing, tail=tail, by_name=by_name)
                raise
            if found.built.kept.held:
                self.prologue()
            if found.built.kept.deferred:
                self.fold()
        return self._compiled[key]

    def _compile(self, key: tuple[Any, ...], build: Callable[[], BuiltProgram]) -> CompiledProgram:
        if key not in self._compiled:
            capture, options = self._facts.capture, self._facts.options
            start, journal = time.perf_counter(), self.journal
            with self._at_work():
                with stage("slicing a program out of the step"):
                    built = build()
                name, mode = built.program.name, capture.fake_mode
                one = partial(
                    lower, fake_mode=mode, options=options, journal=journal, known=self._updates
                )
                tensors = {**capture.buffers, **capture.parameters}
                looking = looked_up(built.program, options, self._facts.setting)
                with stage(f"compiling the {name} program"), looking:
                    lowered = in_stages(built.program, one, tensors, journal)
            self.compile_seconds[name] = seconds = time.perf_counter() - start
            log.info("compiled the %s program in %.2f s", name, seconds)
            waits = bool(built.program.arriving) and is_rewritten(built.program, options)
            inputs = ProgramInputs(built.program.slots)
            self._compiled[key] = CompiledProgram(built, lowered, inputs, waits)
        return self._compiled[key]

    @contextmanager
    def _at_work(self) -> Iterator[None]:
        """Programs are made in this block, by this thread alone; at its outermost end they can run."""
        timeout = self._facts.options.rank_timeout
        with compile_lock, compiling(timeout), kernels_later():
            yield

    def compile_window(self, parts: frozenset[int]) -> None:
        """The accumulate program; and what closes these parts, while the compilers are at work on that one."""
        start = time.perf_counter()
        with self._at_work():
            found = self.compiled(NONE)
            if kernels_on_their_way():
                self.compiled(parts)
        waited = time.perf_counter() - start - sum(self.compile_seconds.values())
        self.compile_seconds[found.program.name] += max(0.0, waited)

    @property
    def kept(self) -> Invariants:
        """What its windows compute once, as long as they are now."""
        if self._kept is None:
            allowed = "invariants" not in self._facts.options.without
            k = min(n or _UNKNOWN for n in self._steps)
            found = find_invariants(self.plan, k) if allowed else NOTHING
            self._kept = with_early_sums(found, lambda _: self._sums_early)
            self._kept_key = self._kept.key()
        return self._kept

    def change_steps(self, steps: tuple[int, ...]) -> None:
        """Windows are of these lengths from here on."""
        self._steps, self._kept = steps, None

    def sum_in_accumulators(self) -> None:
        """From here on every term goes into its parameter's own sum: somebody looks at these."""
        self._sums_early, self._kept = False, None

    def prologue(self) -> CompiledProgram:
        """Computes the values that are held."""
        return self._for_window("prologue", PROLOGUE)

    def fold(self) -> CompiledProgram:
        """Hands the early sums on to the accumulators."""
        return self._for_window("fold", FOLD)

    def _for_window(self, name: str, passes: list[Pass]) -> CompiledProgram:
        key = (name, self.kept.key())
        return self._compile(key, lambda: self._build_for_window(key, passes))

    def _build_for_window(self, key: tuple[Any, ...], passes: list[Pass]) -> BuiltProgram:
        if key not in self._built:
            name, *_ = key
            plan = replace(self.plan, invariants=self.kept)
            mode = self._facts.capture.fake_mode
            program = build_for_window(name, plan, mode, self.journal, passes)
            self._keep(key, BuiltProgram(program, {}, {}))
        return self._built[key]

    def masked(self, closing: frozenset[int]) -> CompiledProgram | None:
        """The boundary program where it masks an empty window, compiled; None for an update that makes state."""
        _, traced = self._select(closing, False, False)
        if any(isinstance(u, Opaque) or u.makes_state for u in traced.values()):
            return None
        found = self.compiled(closing)
        return found if found.program.masked else None

    def check_shares(self) -> None:
        """Before the first call: raises `ShareError` where updates cannot be shared out as asked."""
        if self._facts.shares and not self._divides:
            refuse_opaque(binding.trace() for binding in self.bindings.values())
            self._divides = True

    def build(self, closing: frozenset[int], *, tail: bool = False) -> Program:
        """The program before lowering."""
        return self._build(*self._select(closing, tail, False)).program

    def build_plain(self) -> Program:
        """The accumulate program that would run if nothing were held, before lowering."""
        mode = self._facts.capture.fake_mode
        return build("accumulate", self.plan, mode, Journal(), tail=False)

    def build_held(self) -> dict[str, Program]:
        """The prologue and the fold before lowering, where there are any, by name."""
        wanted = [("prologue", PROLOGUE, self.kept.held), ("fold", FOLD, self.kept.deferred)]
        return {
            name: self._build_for_window((name, self.kept.key()), passes).program
            for name, passes, needed in wanted
            if needed
        }

    def _select(
        self, closing: frozenset[int], tail: bool, by_name: bool
    ) -> tuple[tuple[Any, ...], dict[str, Update | Opaque]]:
        """The key of a program, and the updates that are traced for it. What was built keeps its updates alive, so
        that no other ever has their ids."""
        traced = {n: b.trace() for n, b in self.bindings.items() if b.part in closing}
        if self._facts.shares:
            refuse_opaque(traced.values())
        held = NOTHING if tail else self.kept
        key = () if not held.held else self._kept_key
        return (closing, tail, by_name, key, *map(id, traced.values())), traced

    def _build(self, key: tuple[Any, ...], traced: dict[str, Update | Opaque]) -> BuiltProgram:
        closing, tail, by_name, *_ = key
        if key not in self._built:
            updates = {n: u for n, u in traced.items() if not isinstance(u, Opaque)}
            opaque = {n: u for n, u in traced.items() if isinstance(u, Opaque)}
            plan = replace(
                self.plan,
                closing=closing,
                buckets=self._facts.buckets_by_name if by_name else self._facts.buckets,
                updates=updates,
                opaque=opaque,
                state_tensors={n: self.bindings[n].state_tensors(u) for n, u in updates.items()},
                voted=bool(closing) and self._facts.options.commit is not None,
                masked=bool(closing) and not tail and not opaque and self._facts.masks,
                pieces=pieces_of(self._facts, [self.bindings[n] for n in updates]),
                invariants=self._read_by(closing, tail),
            )
            name = self._name(closing, tail)
            program = build(name, plan, self._facts.capture.fake_mode, self.journal, tail=tail)
            self._keep(key, BuiltProgram(program, updates, opaque, plan.invariants))
        return self._built[key]

    def _read_by(self, closing: frozenset[int], tail: bool) -> Invariants:
        """What a program reads of what is held. One that closes does the linear work on its parts' sums, too, unless
        this call's terms are weighed: those that wait in early sums are, already."""
        if tail:
            return NOTHING
        if not closing:
            return self.kept
        weighed, part_of = self._facts.weighs, self.plan.part_of_leaf
        return with_early_sums(
            self.kept, lambda d: not weighed and part_of[next(iter(d.others))] in closing
        )

    def _keep(self, key: tuple[Any, ...], built: BuiltProgram) -> None:
        program = built.program
        self._built[key], self.by_name[program.name] = built, program
        if log.isEnabledFor(logging.DEBUG):
            nodes = len(program.module.graph.nodes)
            log.debug("%s program, %d nodes:\n%s", program.name, nodes, program.listing())
        add_to_trace(self._facts.capture.name, program.name, program.listing)

    def _name(self, closing: frozenset[int], tail: bool) -> str:
        if not closing:
            return "accumulate"
        name = "tail" if tail else "boundary"
        if closing >= set(self._facts.parts):
            return name
        some = [type(b.optimizer).__name__ for b in self.bindings.values() if b.part in closing]
        return f"{name} of {', '.join(some)} ({', '.join(map(str, sorted(closing)))})"


def _bind(facts: CapturedFacts) -> dict[str, Binding]:
    """The step's updates, each bound to its optimizer."""
    bindings: dict[str, Binding] = {}
    for node, part in facts.part_of_update.items():
        fresh = _bound(node, part, facts)
        for other in bindings.values():
            if other.shares_state(fresh):
                for one in (other, fresh):
                    one.leave_as_it_is("it is called more than once in a step, and has state")
        bindings[update_key(node)] = fresh
    return bindings


def _bound(node: Node, part: int, facts: CapturedFacts) -> Binding:
    handle, which = node.args[0], node.args[1]
    optimizer = facts.capture.optimizers[handle]  # type: ignore[index]
    given = str(argument(node, 4))
    shares, shared = None, frozenset[int]()
    if facts.shares:
        rank, world = facts.setting.rank, facts.setting.world
        shares = shares_of(optimizer, rank, world, simulated=facts.simulated)
        shared = facts.shared_parameters
    else:
        refuse_divided(optimizer)
    table = decompositions(facts.options)
    return Binding(optimizer, tuple(which), given, table, part, shares, shared)  # type: ignore[arg-type]
