"""One capture with its programs: built, lowered and bound on first use."""

from __future__ import annotations

from typing import Any

import torch

from gradsync_fx.capture import Capture
from gradsync_fx.errors import UpdateError
from gradsync_fx.journal import Journal
from gradsync_fx.lowering import Compiled, decompositions, lower
from gradsync_fx.options import Options
from gradsync_fx.passes import build
from gradsync_fx.plan import Plan
from gradsync_fx.planning import Setting, find_buckets, find_setting, layout_fingerprint
from gradsync_fx.program import Kind, Program
from gradsync_fx.regions import find_regions
from gradsync_fx.updates import Binding


class CapturedStep:
    """Runs the accumulate, boundary and tail programs of one captured step over flat inputs."""

    def __init__(
        self, capture: Capture, options: Options, accumulators: dict[str, torch.Tensor]
    ) -> None:
        self.capture, self.options = capture, options
        self.regions = find_regions(capture.step)
        self.setting: Setting = find_setting(capture, options)
        self.journal = Journal()
        self.programs: dict[str, Program] = {}
        self._compiled: dict[tuple[Any, ...], tuple[Program, Compiled]] = {}
        self.bindings = self._bind()
        buckets = find_buckets(capture, self.regions, self.setting, options)
        self.layout = layout_fingerprint(capture, buckets)
        self.plan = Plan(
            step=capture.step,
            regions=self.regions,
            buckets=buckets,
            accumulators=accumulators,
            updates={},
            state_tensors={},
            wire_dtype=options.reduce_dtype,
            sync_each_batch=options.sync_each_batch,
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters that receive a gradient in this capture."""
        return tuple(self.capture.step.leaves[i].name for i in self.regions.leaves)

    @property
    def compile_count(self) -> int:
        return len(self._compiled)

    def _bind(self) -> dict[str, Binding]:
        bindings = {}
        for node in self.regions.updates:
            handle, which = node.args[0], node.args[1]
            optimizer = self.capture.optimizers[handle]  # type: ignore[index]
            if optimizer._optimizer_step_pre_hooks:
                raise UpdateError(
                    f"{type(optimizer).__name__}",
                    seen="it has hooks that run before its step",
                    wanted="an optimizer without step_pre_hooks",
                    fix="do what the hook does inside the step, between backward() and optimizer.step()",
                )
            bindings[node.name] = Binding(optimizer, tuple(which), decompositions(self.options))  # type: ignore[arg-type]
        return bindings

    def compile(self, name: str) -> tuple[Program, Compiled]:
        """The program and its compiled form, made on first need (or when the optimizer's structure changed)."""
        key: tuple[Any, ...] = (name,)
        if name != "accumulate":
            self.plan.updates = {n: b.trace() for n, b in self.bindings.items()}
            self.plan.state_tensors = {
                n: b.state_tensors(self.plan.updates[n]) for n, b in self.bindings.items()
            }
            key = (name, *(id(u) for u in self.plan.updates.values()))
        if key not in self._compiled:
            program = build(name, self.plan, self.capture.fake_mode, self.journal)
            self.programs[name] = program
            self._compiled[key] = (program, lower(program, self.capture.fake_mode, self.options))
        return self._compiled[key]

    def accumulate(self, args: list[Any]) -> Any:
        """One micro-step into the accumulators."""
        program, compiled = self.compile("accumulate")
        with torch.no_grad():
            return compiled(self._inputs(program, args, {}))

    def boundary(self, args: list[Any], divisors: dict[str, float]) -> Any:
        """One micro-step, the reduction of the window and the update."""
        return self._update("boundary", args, divisors)

    def tail(self, divisors: dict[str, float]) -> None:
        """Reduction and update of what is summed already."""
        self._update("tail", self.last_inputs(), divisors)

    def last_inputs(self) -> list[Any]:
        """Parameters and buffers by position; data is not kept between calls."""
        parameters = {**self.capture.buffers, **self.capture.parameters}
        return [
            parameters.get(slot.name) if slot.kind is not Kind.DATA else None
            for slot in self.capture.step.slots
        ]

    def _update(self, name: str, args: list[Any], divisors: dict[str, float]) -> Any:
        program, compiled = self.compile(name)
        updates = dict(self.plan.updates)
        held: dict[tuple[Kind, Any], torch.Tensor] = {
            (Kind.SCALAR, ("divisor", which)): torch.tensor(value, dtype=torch.float64)
            for which, value in divisors.items()
        }
        for key, binding in self.bindings.items():
            for i, tensor in enumerate(self.plan.state_tensors[key]):
                held[Kind.STATE, (key, i)] = tensor
            for i, scalar in enumerate(binding.scalars(updates[key])):
                held[Kind.SCALAR, (key, i)] = scalar
        with torch.no_grad():
            results = list(compiled(self._inputs(program, args, held)))
        for key in reversed(self.bindings):
            count = len(updates[key].created)
            created = results[len(results) - count :]
            del results[len(results) - count :]
            self.bindings[key].commit(updates[key], created)
        return results

    def _inputs(
        self, program: Program, args: list[Any], held: dict[tuple[Kind, Any], torch.Tensor]
    ) -> list[Any]:
        sums = self.plan.accumulators
        return [
            sums[slot.key]
            if slot.kind is Kind.ACCUMULATOR
            else held[slot.kind, slot.key]
            if slot.kind in (Kind.STATE, Kind.SCALAR)
            else args[slot.key]
            for slot in program.slots
        ]
