"""The runtime: one window, its accumulators, and the choice of a program by the counter."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist

from gradsync_fx.capture import Capture, hook_error
from gradsync_fx.captured import CapturedStep
from gradsync_fx.errors import GradSyncWarning, WindowError
from gradsync_fx.options import Options, check_steps
from gradsync_fx.planning import accumulator_dtype
from gradsync_fx.ranks import BOUNDARY, FLUSH, Position, broadcast, check_replicas, exchange
from gradsync_fx.regions import check_deferrable
from gradsync_fx.state import foreign_state, pack, restore, unpack
from gradsync_fx.window import WindowState


class Prepared(Exception):
    """Ends a call of `prepare` once the programs exist: nothing of the step may run."""


class Executor:
    """Owns the window: counter, accumulators, captures. Everything that `optimize`'s step offers is asked of it."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.window = WindowState()
        self.sync_gradients = False
        self.accumulators: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, torch.Tensor] = {}
        self.captures: list[CapturedStep] = []
        self._in_window: dict[str, None] = {}
        self._next_buffers: dict[str, torch.Tensor] = {}
        self._by_structure: dict[str, CapturedStep] = {}
        self._discards = 0
        self._latest: CapturedStep | None = None
        self._restored: dict[str, torch.Tensor] = {}
        self.preparing = False

    @property
    def k(self) -> int:
        return self.options.gradient_accumulation_steps

    def on_capture(self, capture: Capture) -> Any:
        """Prepares a capture to run; returns what runs it.

        A capture that computes what an earlier one does runs the earlier one's programs: Dynamo traces anew when any
        Python value that it guards on changes, also where the graph stays the same.
        """
        self._check_capture(capture)
        structure = capture.step.structure()
        known = self._by_structure.get(structure)
        if known is not None:
            return lambda args: self.run(known, args)
        captured = CapturedStep(capture, self.options, self.accumulators)
        if self.k > 1:
            check_deferrable(capture.step, captured.regions)
        for leaf in captured.regions.leaves:
            name, parameter = capture.step.leaves[leaf].name, capture.step.leaves[leaf].parameter
            if name not in self.accumulators:
                dtype = accumulator_dtype(parameter, self.options)
                self.accumulators[name] = torch.zeros_like(
                    parameter, dtype=dtype, requires_grad=False
                )
                self.parameters[name] = parameter
                if name in self._restored:
                    restore(name, self.accumulators[name], self._restored.pop(name))
        if not self.captures and captured.setting.group is not None:
            check_replicas(captured.setting.group, capture.parameters)
        if self._restored:
            raise foreign_state(next(iter(self._restored)), list(self.accumulators))
        self.captures.append(captured)
        self._by_structure[structure] = captured
        return lambda args: self.run(captured, args)

    def _check_capture(self, capture: Capture) -> None:
        if capture.hooked and self.k > 1:
            raise hook_error(capture.hooked[0])
        for earlier in self.captures:
            for mine, theirs in zip(earlier.capture.optimizers, capture.optimizers, strict=False):
                if mine is not theirs:
                    raise WindowError(
                        f"optimizer {type(theirs).__name__} (id {id(theirs):#x})",
                        seen="this step was captured with another optimizer object before",
                        wanted="the same model and optimizer at every call",
                        fix="make a step of its own for it: gradsync_fx.optimize(train_step, ...)",
                    )
        for name, parameter in capture.parameters.items():
            if name in self.parameters and self.parameters[name] is not parameter:
                raise WindowError(
                    f"parameter {name!r}",
                    seen="this step was captured with another model object before",
                    wanted="the same model and optimizer at every call",
                    fix="make a step of its own for it: gradsync_fx.optimize(train_step, ...)",
                )

    def drop_user_gradients(self) -> None:
        """`.grad` is None between calls; what stands there is dropped with a warning."""
        dropped = [name for name, p in self.parameters.items() if p.grad is not None]
        for name in dropped:
            self.parameters[name].grad = None
        if dropped:
            warnings.warn(
                f"{dropped[0]!r} had a .grad ({len(dropped)} parameters in all): dropped. The window's gradients are "
                "kept in accumulators; see step.gradients().",
                GradSyncWarning,
                stacklevel=3,
            )

    def run(self, captured: CapturedStep, args: list[Any]) -> Any:
        """One micro-step: the accumulate or the boundary program, as the counter says."""
        if self.preparing:
            captured.compile("boundary")
            if self.k > 1:
                captured.compile("accumulate")
            raise Prepared
        if captured is not self._latest:
            self._check_still_trained()
            self._latest = captured
        self._buffers_before(captured)
        if not self.window.closes(self.k):
            results = captured.accumulate(args)
            self._in_window.update(dict.fromkeys(captured.names))
            self.window, self.sync_gradients = self.window.accumulated(), False
            return results
        for name in self._in_window:
            if name not in captured.names:
                raise WindowError(
                    f"parameter {name!r}",
                    seen="it received a gradient earlier in this window, but not in the call that closes it",
                    wanted="the same parameters in every micro-step of a window",
                )
        after = self.window.accumulated()
        divisors = self._agree(captured, after, BOUNDARY)[0]
        results = captured.boundary(args, divisors)
        self._buffers_after(captured)
        self._in_window.clear()
        self.window, self.sync_gradients = after.closed(updated=True), True
        return results

    def _check_still_trained(self) -> None:
        """A parameter with a sum in the open window must stay trainable until it closes."""
        for name in self._in_window:
            if not self.parameters[name].requires_grad:
                raise WindowError(
                    f"requires_grad of {name!r}",
                    seen=f"it changed inside a window (micro-step {self.window.pending + 1}/{self.k})",
                    wanted="a change between two windows",
                    fix="freeze it at a boundary, or call step.flush() or step.discard() first",
                )

    def _buffers_before(self, captured: CapturedStep) -> None:
        """Rank 0's buffers at the start of a window, as DDP under `no_sync` has them, or at every call."""
        setting, buffers = captured.setting, captured.capture.buffers
        if setting.group is None or setting.broadcast_buffers == "never" or not buffers:
            return
        if setting.broadcast_buffers == "every" or self.window.micro_step == 0:
            broadcast(setting.group, list(buffers.values()))
        elif self.window.pending == 0:
            for name, value in self._next_buffers.items():
                buffers[name].copy_(value)
        self._next_buffers.clear()

    def _buffers_after(self, captured: CapturedStep) -> None:
        """Fetches rank 0's buffers for the next window while all ranks meet: its first call may not be theirs."""
        setting = captured.setting
        if setting.group is not None and setting.broadcast_buffers == "window_start":
            self._next_buffers = {n: b.clone() for n, b in captured.capture.buffers.items()}
            broadcast(setting.group, list(self._next_buffers.values()))

    def _agree(
        self, captured: CapturedStep, after: WindowState, kind: int
    ) -> tuple[dict[str, float], list[Position]]:
        setting = captured.setting
        mine = Position(
            kind,
            self.k,
            after.pending,
            after.summed,
            after.optimizer_step,
            captured.layout,
            self._discards,
        )
        everyone = exchange(setting.group, mine)
        total = sum(p.summed for p in everyone)
        if self.options.reduction == "sum":
            return {"ranks": float(setting.world), "local": 1.0}, everyone
        return {"ranks": float(total), "local": total / setting.world}, everyone

    def flush(self, on_update: Any = None) -> None:
        """Closes the open window with what is summed; keeps ranks that still have data company."""
        self.sync_gradients = False
        if not self.captures:
            if dist.is_available() and dist.is_initialized():
                raise WindowError(
                    "flush",
                    seen="this rank has captured nothing yet",
                    wanted="at least one call before flush",
                    fix="call step.prepare(...) first",
                )
            return
        captured = self.captures[-1]
        while True:
            divisors, everyone = self._agree(captured, self.window, FLUSH)
            total = sum(p.summed for p in everyone)
            if total:
                captured.tail(divisors)
                self._buffers_after(captured)
                self.sync_gradients = True
                if on_update is not None:
                    on_update()
            self._in_window.clear()
            self.window = self.window.closed(updated=bool(total))
            if all(p.kind == FLUSH for p in everyone):
                return

    def skip(self) -> None:
        """A slot without data."""
        if not self.captures:
            raise WindowError(
                "skip",
                seen="this rank has captured nothing yet",
                wanted="a call or prepare before skip",
                fix="call step.prepare(...) first",
            )
        captured = self.captures[-1]
        after = self.window.skipped()
        self.sync_gradients = False
        if not self.window.closes(self.k):
            self.window = after
            return
        divisors, everyone = self._agree(captured, after, BOUNDARY)
        total = sum(p.summed for p in everyone)
        if total:
            captured.tail(divisors)
            self._buffers_after(captured)
        else:
            warnings.warn(
                "a window closed without a single term on any rank: no update",
                GradSyncWarning,
                stacklevel=3,
            )
        self._in_window.clear()
        self.window, self.sync_gradients = after.closed(updated=bool(total)), bool(total)

    def discard(self) -> None:
        """Drops the open window."""
        for tensor in self.accumulators.values():
            tensor.zero_()
        self._in_window.clear()
        self._discards += 1
        self.window, self.sync_gradients = self.window.closed(updated=False), False

    def state_dict(self) -> dict[str, Any]:
        """Counters, accumulators, and the buffers fetched for the next window; see `state.pack`."""
        rank, world = self._place()
        return pack(
            self.window,
            self.k,
            rank,
            world,
            self.accumulators,
            self._next_buffers,
            list(self._in_window),
        )

    def load_state_dict(self, given: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises `StateError` where it does not fit."""
        rank, world = self._place()
        state = unpack(given, self.k, rank, world)
        names = set(state.accumulators)
        if self.accumulators and names and names != set(self.accumulators):
            raise foreign_state(next(iter(names ^ set(self.accumulators))), list(self.accumulators))
        for tensor in self.accumulators.values():
            tensor.zero_()
        for name, value in state.accumulators.items():
            if name in self.accumulators:
                restore(name, self.accumulators[name], value)
        self._restored = {n: v for n, v in state.accumulators.items() if n not in self.accumulators}
        self._next_buffers = state.next_buffers
        self._in_window = dict.fromkeys(state.in_window)
        self.window, self.sync_gradients = state.window, False

    def _place(self) -> tuple[int, int]:
        if self.captures:
            setting = self.captures[0].setting
            return setting.rank, setting.world
        group = self.options.process_group
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(group), dist.get_world_size(group)
        return 0, 1

    def set_steps(self, k: int) -> None:
        """Another window length, at a boundary."""
        check_steps(k)
        if self.window.pending and k != self.k:
            raise WindowError(
                "gradient_accumulation_steps",
                seen=f"k changed from {self.k} to {k} with {self.window.pending} pending micro-steps",
                wanted="a change between two windows",
                fix="call step.flush() or step.discard() first",
            )
        self.options = self.options.with_steps(k)
        if k > 1:
            for captured in self.captures:
                check_deferrable(captured.capture.step, captured.regions)
