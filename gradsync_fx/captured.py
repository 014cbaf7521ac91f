"""One capture with its programs: built, lowered and bound on first use."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch

from gradsync_fx.capture import Capture
from gradsync_fx.errors import CaptureError, UpdateError
from gradsync_fx.journal import Journal
from gradsync_fx.lowering import Compiled, decompositions, lower
from gradsync_fx.options import Options
from gradsync_fx.passes import build
from gradsync_fx.passes.update import update_key
from gradsync_fx.passes.weigh import carrier
from gradsync_fx.plan import Plan, Weighing
from gradsync_fx.planning import (
    Setting,
    find_buckets,
    find_parts,
    find_setting,
    layout_fingerprint,
)
from gradsync_fx.presence import compiling
from gradsync_fx.program import Kind, Program
from gradsync_fx.regions import check_weights, find_regions
from gradsync_fx.updates import Binding


NONE: frozenset[int] = frozenset()
Divisors = dict[tuple[str, int], float]


class CapturedStep:
    """Runs the programs of one captured step over flat inputs: a micro-step that closes some parts, or a tail."""

    def __init__(
        self,
        capture: Capture,
        options: Options,
        accumulators: dict[str, torch.Tensor],
        weights: dict[int, torch.Tensor],
    ) -> None:
        self.capture, self.options = capture, options
        self.regions = find_regions(capture.step)
        self.setting: Setting = find_setting(capture, options)
        self.journal = Journal()
        self.programs: dict[str, Program] = {}
        self._compiled: dict[tuple[Any, ...], tuple[Program, Compiled]] = {}
        self._host_values: list[torch.Tensor] = []
        self._tail_data: dict[int, Any] = {}
        leaf_parts, update_parts = find_parts(capture, self.regions, options)
        self.bindings = self._bind(update_parts)
        ready = find_buckets(capture, self.regions, self.setting, options, leaf_parts)
        self._by_name = find_buckets(
            capture, self.regions, self.setting, options, leaf_parts, by_name=True
        )
        self.layout = layout_fingerprint(capture, ready)
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
            state_tensors={},
            wire_dtype=self.setting.wire_dtype,
            sync_each_batch=options.sync_each_batch,
        )

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

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that receive a gradient in this capture."""
        return self.names_of(self.plan.parts)

    def names_of(self, parts: Iterable[int]) -> tuple[str, ...]:
        """Those of them that belong to these parts of the window."""
        wanted, leaves = set(parts), self.capture.step.leaves
        return tuple(
            leaves[i].name for i in self.regions.leaves if self.plan.part_of_leaf[i] in wanted
        )

    @property
    def updates(self) -> bool:
        """Whether the step changes a parameter: a call without an update can only accumulate."""
        return bool(self.regions.updates or self.regions.boundary_writes)

    @property
    def speaks_in_every_call(self) -> bool:
        """Whether also an accumulate call has collectives of ours."""
        if self.setting.group is None:
            return False
        return self.options.sync_each_batch or (
            self.setting.broadcast_buffers == "every" and bool(self.capture.buffers)
        )

    @property
    def compile_count(self) -> int:
        return len(self._compiled)

    def _bind(self, parts: dict[Any, int]) -> dict[str, Binding]:
        bindings = {}
        for node, part in parts.items():
            handle, which = node.args[0], node.args[1]
            optimizer = self.capture.optimizers[handle]
            if optimizer._optimizer_step_pre_hooks:
                raise UpdateError(
                    f"{type(optimizer).__name__}",
                    seen="it has hooks that run before its step",
                    wanted="an optimizer without step_pre_hooks",
                    fix="do what the hook does inside the step, between backward() and optimizer.step()",
                )
            bindings[update_key(node)] = Binding(
                optimizer, tuple(which), decompositions(self.options), part
            )
        return bindings

    def compile(
        self, closing: frozenset[int], *, tail: bool = False, by_name: bool = False
    ) -> tuple[Program, Compiled]:
        """The program and its compiled form, made on first need (or when the optimizer's structure changed)."""
        active = {n: b for n, b in self.bindings.items() if b.part in closing}
        self.plan.updates = {n: b.trace() for n, b in active.items()}
        self.plan.state_tensors = {
            n: b.state_tensors(self.plan.updates[n]) for n, b in active.items()
        }
        key = (closing, tail, by_name, *(id(u) for u in self.plan.updates.values()))
        if key not in self._compiled:
            name = self._name(closing, tail)
            plan = replace(
                self.plan, closing=closing, buckets=self._by_name if by_name else self.plan.buckets
            )
            with compiling(self.options.rank_timeout):
                program = build(name, plan, self.capture.fake_mode, self.journal, tail=tail)
                self.programs[name] = program
                lowered = lower(program, self.capture.fake_mode, self.options)
            self._compiled[key] = (program, lowered)
        return self._compiled[key]

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
        self._tail_data = {i: args[i] for i in self.regions.tail_data}
        results = self._run(program, compiled, args, divisors)
        if program.host_values:
            end = len(results) - program.host_values
            self._host_values = results[end:]
            del results[end:]
        self._call_host(closing)
        return results

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
        with torch.no_grad():
            results = list(compiled(self._inputs(program, args, held)))
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
            if slot.kind in (Kind.STATE, Kind.SCALAR)
            else args[slot.key]
            for slot in program.slots
        ]

    def _call_host(self, closing: frozenset[int]) -> None:
        """Schedulers step once for each update, with the latest values where they want a metric."""
        for call in self.capture.host_calls:
            parts = {b.part for b in self.bindings.values() if b.optimizer is call.optimizer}
            if closing & (parts or set(self.plan.parts)):
                call.owner.step(
                    *(self._host_values[v] if kind == "note" else v for kind, v in call.arguments)
                )

    def take_part(self) -> None:
        """Zeros into the reductions of the other ranks' accumulate call; what they sum comes in here, too."""
        plan, leaves = self.plan, self.capture.step.leaves
        weights = dict(plan.weights) if plan.weighing else {}
        carriers = {carrier(plan, part): part for part in weights}
        for bucket in plan.buckets:
            held = [plan.accumulators[leaves[i].name] for i in bucket.leaves]
            if bucket in carriers:
                held.append(weights.pop(carriers[bucket]))
            reduction = bucket.reduction
            _add_reduced(held, plan.wire_dtype, reduction.op, reduction.group)
        for weight in weights.values():
            _add_reduced([weight], weight.dtype, "sum", plan.group)


def _add_reduced(
    held: list[torch.Tensor], wire: torch.dtype | None, op: str, group: str | None
) -> None:
    if group is None:
        return
    sizes = [t.numel() for t in held]
    flat = torch.zeros(sum(sizes), dtype=wire or held[0].dtype, device=held[0].device)
    total = torch.ops._c10d_functional.all_reduce(flat, op, group)
    total = torch.ops._c10d_functional.wait_tensor(total)
    for tensor, term in zip(held, total.split(sizes), strict=True):
        tensor.add_(term.view_as(tensor))
