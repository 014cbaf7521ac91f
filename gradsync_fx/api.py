"""`optimize`: the front door."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from gradsync_fx.capture import traced
from gradsync_fx.executor import Executor, Prepared
from gradsync_fx.inspection.report import Report, make_report
from gradsync_fx.lowering import decompositions
from gradsync_fx.options import Options


class OptimizedStep:
    """What `optimize` returns: call it like the step; it also shows and controls the window.

    Attributes are described in `optimize`'s documentation.
    """

    def __init__(self, train_step: Callable[..., Any], options: Options) -> None:
        functools.update_wrapper(self, train_step)
        self._executor = Executor(options)
        self._call = traced(
            train_step, self._executor.on_capture, decompositions(options), options.dynamic
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-step. Returns what the step returns, tensors detached."""
        executor = self._executor
        first = not executor.captures
        executor.drop_user_gradients()
        result = self._call(*args, **kwargs)
        if first:
            executor.drop_user_gradients()
        return result

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Captures and compiles for these arguments without running anything."""
        self._executor.preparing = True
        try:
            self._call(*args, **kwargs)
        except Prepared:
            pass
        finally:
            self._executor.preparing = False

    @property
    def sync_gradients(self) -> bool:
        """Whether the last call was a boundary."""
        return self._executor.sync_gradients

    @property
    def micro_step(self) -> int:
        """Calls so far; 1-based, a boundary when `pending` reached k."""
        return self._executor.window.micro_step

    @property
    def optimizer_step(self) -> int:
        """Updates so far."""
        return self._executor.window.optimizer_step

    @property
    def pending(self) -> int:
        """Micro-steps in the open window."""
        return self._executor.window.pending

    @property
    def compile_count(self) -> int:
        """Programs compiled so far, the tail program included."""
        return sum(c.compile_count for c in self._executor.captures)

    @property
    def programs(self) -> dict[str, torch.fx.GraphModule]:
        """Name to graph before lowering, of the latest capture that has it."""
        found: dict[str, torch.fx.GraphModule] = {}
        for captured in self._executor.captures:
            found.update({name: p.module for name, p in captured.programs.items()})
        return found

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Parameter name to a view of its running sum (the accumulator's shape and dtype)."""
        return {name: t.view_as(t) for name, t in self._executor.accumulators.items()}

    def flush(self, on_update: Callable[[], Any] | None = None) -> None:
        """Closes the open window now: reduce, update, zero. Every rank calls it."""
        self._executor.flush(on_update)

    def skip(self) -> None:
        """This rank's micro-step without data."""
        self._executor.skip()

    def discard(self) -> None:
        """Drops the open window; `micro_step` keeps counting."""
        self._executor.discard()

    def state_dict(self) -> dict[str, Any]:
        """Counters, accumulators by parameter name, k, world size: plain tensors and numbers.

        What differs between ranks has the rank in its key. A run that is stopped inside a window and resumed from it
        is bitwise the run that was not.
        """
        return self._executor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises `StateError` with both values where it does not fit."""
        self._executor.load_state_dict(state)

    def report(self) -> Report:
        """What the rewrite changed, for what has been captured so far. Raises `WindowError` before the first call."""
        return make_report(self._executor.captures, self._executor.k)

    def set_gradient_accumulation_steps(self, k: int) -> None:
        """Another window length from the next window on. Raises `WindowError` inside a window. Never recompiles."""
        self._executor.set_steps(k)


def optimize(train_step: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Gradient accumulation under data parallelism, in the compiler."""
    checked = Options.of(options)
    if train_step is None:
        return lambda function: OptimizedStep(function, checked)
    return OptimizedStep(train_step, checked)
