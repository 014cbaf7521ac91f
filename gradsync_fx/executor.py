"""The runtime: one window, its accumulators, and the choice of a program by the counter."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from gradsync_fx.capture import Capture
from gradsync_fx.captured import CapturedStep
from gradsync_fx.errors import CaptureError, GradSyncWarning, WindowError
from gradsync_fx.options import Options, check_steps
from gradsync_fx.planning import accumulator_dtype
from gradsync_fx.ranks import BOUNDARY, FLUSH, Position, broadcast, check_replicas, exchange
from gradsync_fx.regions import check_deferrable
from gradsync_fx.window import WindowState


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

    @property
    def k(self) -> int:
        return self.options.gradient_accumulation_steps

    def on_capture(self, capture: Capture) -> Any:
        """Prepares a capture to run; returns what runs it."""
        self._check_capture(capture)
        captured = CapturedStep(capture, self.options, self.accumulators)
        if self.k > 1:
            check_deferrable(capture.step, captured.regions)
        for leaf in captured.regions.leaves:
            known = capture.step.leaves[leaf]
            if known.name not in self.accumulators:
                dtype = accumulator_dtype(known.parameter, self.options)
                self.accumulators[known.name] = torch.zeros_like(known.parameter, dtype=dtype, requires_grad=False)
                self.parameters[known.name] = known.parameter
        if not self.captures and captured.setting.group is not None:
            check_replicas(captured.setting.group, capture.parameters)
        self.captures.append(captured)
        return lambda args: self.run(captured, args)

    def _check_capture(self, capture: Capture) -> None:
        if capture.hooked and self.k > 1:
            raise CaptureError(
                f"hook on {capture.hooked[0]!r}",
                seen="a gradient hook (an optimizer that runs inside backward, perhaps); it would see partial sums",
                wanted="parameters without gradient hooks when gradient_accumulation_steps > 1",
                fix="remove the hook, and do its work between backward() and optimizer.step()",
            )
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
                    f"parameter {name!r}", seen="this step was captured with another model object before",
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
                GradSyncWarning, stacklevel=3,
            )

    def run(self, captured: CapturedStep, args: list[Any]) -> Any:
        """One micro-step: the accumulate or the boundary program, as the counter says."""
        opens = self.window.pending == 0
        self._broadcast(captured, opens)
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
        self._in_window.clear()
        self.window, self.sync_gradients = after.closed(updated=True), True
        return results

    def _broadcast(self, captured: CapturedStep, opens: bool) -> None:
        setting = captured.setting
        if setting.group is None or not captured.capture.buffers:
            return
        if setting.broadcast_buffers == "every" or (opens and setting.broadcast_buffers == "window_start"):
            broadcast(setting.group, list(captured.capture.buffers.values()))

    def _agree(
        self, captured: CapturedStep, after: WindowState, kind: int
    ) -> tuple[dict[str, float], list[Position]]:
        setting = captured.setting
        mine = Position(kind, self.k, after.pending, after.summed, after.optimizer_step, captured.layout, 0)
        everyone = exchange(setting.group, mine)
        total = sum(p.summed for p in everyone)
        if self.options.reduction == "sum":
            return {"ranks": float(setting.world), "local": 1.0}, everyone
        return {"ranks": float(total), "local": total / setting.world}, everyone

    def flush(self, on_update: Any = None) -> None:
        """Closes the open window with what is summed; keeps ranks that still have data company."""
        self.sync_gradients = False
        if not self.captures:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                raise WindowError(
                    "flush", seen="this rank has captured nothing yet", wanted="at least one call before flush",
                    fix="call step.prepare(...) first",
                )
            return
        captured = self.captures[-1]
        while True:
            divisors, everyone = self._agree(captured, self.window, FLUSH)
            total = sum(p.summed for p in everyone)
            if total:
                captured.tail(divisors)
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
                "skip", seen="this rank has captured nothing yet", wanted="a call or prepare before skip",
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
        else:
            warnings.warn(
                "a window closed without a single term on any rank: no update", GradSyncWarning, stacklevel=3
            )
        self._in_window.clear()
        self.window, self.sync_gradients = after.closed(updated=bool(total)), bool(total)

    def discard(self) -> None:
        """Drops the open window."""
        for tensor in self.accumulators.values():
            tensor.zero_()
        self._in_window.clear()
        self.window, self.sync_gradients = self.window.closed(updated=False), False

    def set_steps(self, k: int) -> None:
        """Another window length, at a boundary."""
        check_steps(k)
        if self.window.pending and k != self.k:
            raise WindowError(
                "gradient_accumulation_steps",
                seen=f"k changed from {self.k} to {k} with {self.window.pending} pending micro-steps",
                wanted="a change between two windows", fix="call step.flush() or step.discard() first",
            )
        self.options = self.options.with_steps(k)
        if k > 1:
            for captured in self.captures:
                check_deferrable(captured.capture.step, captured.regions)
