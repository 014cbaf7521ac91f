"""One capture with its programs: built, lowered and bound on first use."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.profiler import record_function

from gradsync_fx._torch import compile_lock
from gradsync_fx.capture.tracer import Capture
from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.comm.flat_buffers import joined
from gradsync_fx.comm.inplace_all_reduce import forget
from gradsync_fx.comm.liveness import compiling
from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.comm.shm_all_reduce import SharedBuckets, find_shared
from gradsync_fx.errors import CaptureError
from gradsync_fx.ir.journal import Journal
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Program
from gradsync_fx.ir.regions import check_weights, find_regions
from gradsync_fx.lowering.artifacts import artifact
from gradsync_fx.lowering.lower import Compiled, as_it_is, decompositions, lower
from gradsync_fx.optim.binding import Binding, left_as_they_are
from gradsync_fx.optim.opaque import Opaque, warn_of
from gradsync_fx.options import Options
from gradsync_fx.passes import build
from gradsync_fx.passes.stages import in_stages
from gradsync_fx.passes.update import update_key
from gradsync_fx.planning.plan import Plan, Weighing
from gradsync_fx.planning.setting import (
    Setting,
    find_buckets,
    find_parts,
    find_setting,
    layout_fingerprint,
)
from gradsync_fx.planning.shareable import find_shareable
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.divisors import Divisors
from gradsync_fx.runtime.participate import take_part
from gradsync_fx.user_lines import warn_user


log = logging.getLogger(__name__)
NONE: frozenset[int] = frozenset()
_HELD = frozenset((Kind.STATE, Kind.SCALAR))


class CapturedStep:
    """Runs the programs of one captured step over flat inputs: a micro-step that closes some parts, or a tail."""

    def __init__(
        self,
        capture: Capture,
        options: Options,
        accumulators: dict[str, torch.Tensor],
        weights: dict[int, torch.Tensor],
        integrity: Integrity,
        simulated: int | None = None,
    ) -> None:
        self.capture, self.options, self._integrity = capture, options, integrity
        self.regions = find_regions(capture.step)
        self.setting: Setting = find_setting(capture, options, simulated)
        self.journal = Journal()
        self.programs: dict[str, Program] = {}
        self.compile_seconds: dict[str, float] = {}
        self.measured: dict[str, tuple[int, float]] = {}
        self._built: dict[tuple[Any, ...], Program] = {}
        self._compiled: dict[tuple[Any, ...], Compiled] = {}
        self.host_values: dict[int, torch.Tensor] = {}
        self._tail_data: dict[int, Any] = {}
        self._told: set[str] = set()
        leaf_parts, update_parts = find_parts(capture, self.regions, options)
        self.bindings = self._bind(update_parts)
        ready = find_buckets(capture, self.regions, self.setting, options, leaf_parts)
        self._by_name = find_buckets(
            capture, self.regions, self.setting, options, leaf_parts, by_name=True
        )
        self.layout = layout_fingerprint(capture, ready)
        self.shareable = find_shareable(capture, self.setting, options, ready)
        self._shared: SharedBuckets | None = None
        group = self.setting.group
        self.plan = Plan(
            step=capture.step,
            regions=self.regions,
            buckets=ready,
            part_of_leaf=leaf_parts,
            part_of_update=update_parts,
            closing=NONE,
            accumulators=accumulators,
            weights=weights,
            weighing=self._weighing(),
            group=group.group_name if group is not None else None,
            world=self.setting.world,
            updates={},
            opaque={},
            names={id(p): name for name, p in capture.parameters.items()},
            state_tensors={},
            wire_dtype=self.setting.wire_dtype,
            sync_each_batch=options.sync_each_batch,
        )
        real = isinstance(self.setting.group, ProcessGroup)  # none of simulated ranks are asked for
        self.collectives = OwnCollectives.of(self.regions) if real else OwnCollectives()
        # All parameters that receive a gradient: every call asks for them.
        self.names = self.names_of(self.plan.parts)

    def _weighing(self) -> Weighing | None:
        weighted, finite = self.options.reduction == "weighted", self.options.skip_nonfinite
        if weighted and not self.capture.weighed:
            raise CaptureError(
                'reduction="weighted"',
                seen="the step does not say its weight",
                wanted="one call of gradsync_fx.micro_batch_weight(w) in the step",
                fix="call it with the number of tokens (or samples) of the micro-batch, in every branch of the step",
            )
        if not weighted and not finite:
            return None
        check_weights(self.capture.step, self.regions)
        return Weighing(weighted, finite, divides=self.options.reduction != "sum")

    def names_of(self, parts: Iterable[int]) -> tuple[str, ...]:
        """Parameters of these parts of the window that receive a gradient in this capture."""
        wanted, leaves = set(parts), self.capture.step.leaves
        return tuple(
            leaves[i].name for i in self.regions.leaves if self.plan.part_of_leaf[i] in wanted
        )

    @property
    def reduced(self) -> frozenset[str]:
        """Parameters whose gradients are reduced over the ranks of the window, and so stay the same on all of them."""
        return frozenset(
            self.capture.step.leaves[leaf].name
            for bucket in self.plan.buckets
            if bucket.reduction.group == self.plan.group
            for leaf in bucket.leaves
        )

    @property
    def can_close(self) -> bool:
        """Whether its tail can close a window without data."""
        return self.updates

    def layout_for(self, in_window: Collection[str]) -> int:
        """The layout of the buckets; 0 where the open window holds a gradient that has no place in them."""
        return self.layout if set(in_window) <= set(self.names) else 0

    def certain(self, in_window: Collection[str], closing: Collection[int]) -> bool:
        """Whether each gradient that closes has a term that counts, whatever the weight of the call that comes.

        closing: no parts where the other ranks say which.
        """
        return not self.weighs or set(self.names_of(closing or self.plan.parts)) <= set(in_window)

    @property
    def settled(self) -> bool:
        """Whether it knows what it shares with other ranks, or has nothing to share."""
        return self._shared is not None or not self.shareable

    @contextmanager
    def side_by_side(self, line: Line, *, settled: bool) -> Iterator[None]:
        """For a program that all ranks run: the buckets that they share in memory are added up there.

        settled: whether all ranks know which ones; if not, all ranks ask.
        """
        if line.group is not None and not settled:
            leaves, sums = self.capture.step.leaves, self.plan.accumulators
            flats = [joined([sums[leaves[i].name] for i in b.leaves]) for b in self.shareable]
            self._shared = find_shared(line, flats)
            log.info("%d of %d buckets are shared in memory", len(self._shared), len(flats))
        with nullcontext() if self._shared is None else self._shared.in_use():
            yield

    @property
    def weighs(self) -> bool:
        """Whether the weights of a window are known only when its micro-steps have run."""
        return self.plan.weighing is not None

    @property
    def updates(self) -> bool:
        """Whether the step changes a parameter: a call without an update can only accumulate."""
        return bool(self.regions.updates or self.regions.boundary_writes)

    @property
    def speaks_in_every_call(self) -> bool:
        """Whether also an accumulate call meets the other ranks: it has collectives anyway, of ours or of its own."""
        if self.setting.group is None:
            return False
        return (
            self.options.sync_each_batch
            or (self.setting.broadcast_buffers == "every" and bool(self.setting.shared_buffers))
            or self.collectives.each_call > 0
        )

    @property
    def compile_count(self) -> int:
        return len(self._compiled)

    def _bind(self, parts: dict[Any, int]) -> dict[str, Binding]:
        bindings: dict[str, Binding] = {}
        for node, part in parts.items():
            handle, which = node.args[0], node.args[1]
            optimizer = self.capture.optimizers[handle]
            given = str(argument(node, 4))
            fresh = Binding(optimizer, tuple(which), given, decompositions(self.options), part)
            for other in bindings.values():
                if other.shares_state(fresh):
                    for one in (other, fresh):
                        one.leave_as_it_is("it is called more than once in a step, and has state")
            bindings[update_key(node)] = fresh
        return bindings

    def compile(
        self, closing: frozenset[int], *, tail: bool = False, by_name: bool = False
    ) -> tuple[Program, Compiled]:
        """The program and its compiled form, made on first need (or when the optimizer's structure changed)."""
        key = self._select(closing, tail, by_name)
        if key not in self._compiled:
            start = time.perf_counter()
            try:
                with compile_lock, compiling(self.options.rank_timeout):
                    program = self._build(key)
                    mode, journal = self.capture.fake_mode, self.journal
                    one = partial(lower, fake_mode=mode, options=self.options, journal=journal)
                    tensors = {**self.capture.buffers, **self.capture.parameters}
                    lowered = in_stages(program, one, tensors)
            except Exception as failure:
                if left_as_they_are(self.bindings.values(), failure):
                    return self.compile(closing, tail=tail, by_name=by_name)
                raise
            self.compile_seconds[program.name] = seconds = time.perf_counter() - start
            log.info("compiled the %s program in %.2f s", program.name, seconds)
            self._compiled[key] = lowered
        return self._built[key], self._compiled[key]

    def build(self, closing: frozenset[int], *, tail: bool = False) -> Program:
        """The program before lowering."""
        return self._build(self._select(closing, tail, False))

    def _select(self, closing: frozenset[int], tail: bool, by_name: bool) -> tuple[Any, ...]:
        """The key of a program for the optimizers as they are now; their updates are traced for it."""
        active = {n: b for n, b in self.bindings.items() if b.part in closing}
        found = {n: b.trace() for n, b in active.items()}
        self.plan.updates = {n: u for n, u in found.items() if not isinstance(u, Opaque)}
        self.plan.opaque = {n: u for n, u in found.items() if isinstance(u, Opaque)}
        self.plan.state_tensors = {
            n: active[n].state_tensors(u) for n, u in self.plan.updates.items()
        }
        return (closing, tail, by_name, *map(id, found.values()))

    def _build(self, key: tuple[Any, ...]) -> Program:
        closing, tail, by_name, *_ = key
        if key not in self._built:
            buckets = self._by_name if by_name else self.plan.buckets
            plan = replace(self.plan, closing=closing, buckets=buckets)
            name = self._name(closing, tail)
            self._built[key] = build(name, plan, self.capture.fake_mode, self.journal, tail=tail)
            self.programs[name] = self._built[key]
            module = self._built[key].module
            if log.isEnabledFor(logging.DEBUG):
                log.debug("%s program, %d nodes:\n%s", name, len(module.graph.nodes), module.code)
            artifact(name.replace(" ", "_"), lambda: module.code)
        return self._built[key]

    def _name(self, closing: frozenset[int], tail: bool) -> str:
        if not closing:
            return "accumulate"
        name = "tail" if tail else "boundary"
        if closing >= set(self.plan.parts):
            return name
        some = [type(b.optimizer).__name__ for b in self.bindings.values() if b.part in closing]
        return f"{name} of {', '.join(some)} ({', '.join(map(str, sorted(closing)))})"

    def micro_step(self, args: list[Any], closing: frozenset[int], divisors: Divisors) -> list[Any]:
        """One micro-step: adds to the parts that stay open, reduces and updates those that close."""
        program, compiled = self.compile(closing)
        self.remember(args)
        results = self._run(program, compiled, args, divisors)
        self._take_host_values(program, results, range(program.host_values))
        self._call_host(closing)
        return results

    def _take_host_values(
        self, program: Program, results: list[Any], indices: Collection[int]
    ) -> None:
        end = len(results) - program.host_values
        self.host_values |= dict(zip(indices, results[end:], strict=True))
        del results[end:]

    def remember(self, args: list[Any]) -> None:
        """The user's own tensors that a tail reads and writes."""
        self._tail_data = {i: args[i] for i in self.regions.tail_data}

    def tail(
        self, closing: frozenset[int], divisors: Divisors, *, by_name: bool = False
    ) -> list[Any]:
        """Reduction and update of what is summed already. Returns the outputs `regions.tail_outputs`."""
        program, compiled = self.compile(closing, tail=True, by_name=by_name)
        tensors = {**self.capture.buffers, **self.capture.parameters}
        args = [
            self._tail_data.get(i) if slot.kind is Kind.DATA else tensors.get(slot.name)
            for i, slot in enumerate(self.capture.step.slots)
        ]
        results = self._run(program, compiled, args, divisors)
        self._take_host_values(program, results, self.regions.boundary_host)
        self._call_host(closing)
        return results

    def _run(
        self, program: Program, compiled: Compiled, args: list[Any], divisors: Divisors
    ) -> list[Any]:
        updates = dict(self.plan.updates)
        held: dict[tuple[Kind, Any], torch.Tensor] = {
            (Kind.SCALAR, ("divisor", *which)): torch.tensor(value, dtype=torch.float64)
            for which, value in divisors.items()
        }
        for key, update in updates.items():
            for i, tensor in enumerate(self.plan.state_tensors[key]):
                held[Kind.STATE, (key, i)] = tensor
            for i, scalar in enumerate(self.bindings[key].scalars(update)):
                held[Kind.SCALAR, (key, i)] = scalar
        start = time.perf_counter()
        inputs = self._inputs(program, args, held)
        first = None
        if as_it_is(self.options) and program.first_written is not None:
            first = inputs[program.first_written]
            version = first._version
        warn_of(self.plan.opaque, self._told)
        self._integrity.writes(updates=bool(updates or self.plan.opaque))
        try:
            with torch.no_grad(), record_function(f"gradsync_fx: {program.name}"):
                results = list(compiled(inputs))
        except BaseException:
            forget(self.plan.accumulators.values())
            if first is not None and first._version == version:
                self._integrity.spared()  # an assert of the step's own, say
            raise
        calls, seconds = self.measured.get(program.name, (0, 0.0))
        self.measured[program.name] = (calls + 1, seconds + time.perf_counter() - start)
        for key in reversed(updates):
            count = len(updates[key].created)
            created = results[len(results) - count :]
            del results[len(results) - count :]
            self.bindings[key].commit(updates[key], created)
        return results

    def _inputs(
        self, program: Program, args: list[Any], held: dict[tuple[Kind, Any], torch.Tensor]
    ) -> list[Any]:
        owned: dict[Kind, Any] = {
            Kind.ACCUMULATOR: self.plan.accumulators,
            Kind.WEIGHT: self.plan.weights,
        }
        return [
            owned[slot.kind][slot.key]
            if slot.kind in owned
            else held[slot.kind, slot.key]
            if slot.kind in _HELD
            else args[slot.key]
            for slot in program.slots
        ]

    def _call_host(self, closing: frozenset[int]) -> None:
        """Schedulers step once for each update, with the latest values where they want a metric."""
        for call in self.capture.host_calls:
            parts = {b.part for b in self.bindings.values() if b.optimizer is call.optimizer}
            if not closing & (parts or set(self.plan.parts)):
                continue
            wanted = {value for kind, value in call.arguments if kind != "constant"}
            if not wanted <= self.host_values.keys():
                warn_user(
                    f"{type(call.owner).__name__} was not stepped: no micro-step of this rank gave its metric"
                )
                continue
            given = [self._argument(kind, value) for kind, value in call.arguments]
            named = [given.pop() for _ in call.keywords][::-1]
            getattr(call.owner, call.method)(*given, **dict(zip(call.keywords, named, strict=True)))

    def _argument(self, kind: str, value: Any) -> Any:
        if kind == "constant":
            return value
        given = self.host_values[value]
        return given.item() if kind == "number" else given

    def take_part(self) -> None:
        """Zeros into the reductions of the other ranks' accumulate call; what they sum comes in here, too."""
        take_part(self.plan)
