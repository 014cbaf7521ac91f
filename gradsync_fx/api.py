"""`optimize`: the front door."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch

from gradsync_fx.capture.markers import Demand
from gradsync_fx.capture.parallelism import refuse_other_parallelism
from gradsync_fx.capture.tracer import traced
from gradsync_fx.checking.self_check import Verdict, check
from gradsync_fx.comm.rank_failure import NamedLosses
from gradsync_fx.eager.own_errors import USERS_FRAMES, raise_own
from gradsync_fx.eager.window import EagerWindow
from gradsync_fx.errors import CaptureError
from gradsync_fx.inspection.costs import Hardware
from gradsync_fx.inspection.describe import describe
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.uncaptured import describe_eager
from gradsync_fx.lowering.artifacts import artifact
from gradsync_fx.lowering.lower import decompositions
from gradsync_fx.options import Options
from gradsync_fx.runtime.atomic_files import Place
from gradsync_fx.runtime.capture_cache import Found
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.checkpoint import load, load_file, save, save_file
from gradsync_fx.runtime.eager_step import EagerStep
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.refusals import EITHER_WAY, no_copies
from gradsync_fx.runtime.window_ops import (
    discard,
    flush,
    set_steps,
    skip,
    warn_of_mistakes,
    warn_of_pending,
)
from gradsync_fx.threads import OneAtATime


log = logging.getLogger(__name__)


class OptimizedStep:
    """What `optimize` returns: call it like the step; it also shows and controls the window.

    Attributes are described in `optimize`'s documentation.
    """

    def __init__(
        self, train_step: Callable[..., Any], options: Options, simulated: int | None = None
    ) -> None:
        functools.update_wrapper(self, train_step)
        self._executor = Executor(options, simulated)
        self._losses = NamedLosses(self._executor.place, self._executor.absent)
        self._to_check = options.self_check
        self._simulated, self._train_step = simulated is not None, train_step
        self._find = _Finder(train_step, self._executor)
        self._executor.catalogue.retrace = self._find.again
        # The executor outlives this object just long enough to tell what was lost with it.
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        code = getattr(train_step, "__code__", None)
        self._line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        self._one_thread = OneAtATime(
            f"step {self._name!r}",
            fix="make a step for each thread: gradsync_fx.optimize(train_step, ...)",
        )
        weakref.finalize(self, _end, self._executor, self._name, self._line, self._find.at_end)

    def __get__(self, instance: Any, owner: type | None = None) -> OptimizedStep:
        """As a decorated method: each object has a step, and a window, of its own."""
        if instance is None:
            return self
        bound = OptimizedStep(self._train_step.__get__(instance, owner), self._executor.options)
        instance.__dict__[self._name] = bound
        return bound

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-step. Returns what the step returns, tensors detached."""
        with USERS_FRAMES, self._one_thread.held(), self._losses:
            executor = self._executor
            if self._to_check:
                verdict = self.self_check(*args, **kwargs)
                log.info("%s", verdict)
                verdict.require()
                self._to_check = False
            first = executor.setting is None
            executor.integrity.check(self._name)
            executor.accumulators.drop_gradients()
            result = self._find.call(*args, **kwargs)
            if first:
                executor.accumulators.drop_gradients()
                warn_of_mistakes(executor)
            if executor.sync_gradients and executor.window.optimizer_step == 1:
                artifact(self._name, "report", lambda: self.report().to_json())
            return result

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """Captures and compiles for these arguments without running anything."""
        with USERS_FRAMES, self._one_thread.held(), self._losses:
            try:
                captured = self._find.capture_of(args, kwargs)
            except CaptureError as why:
                self._find.run_eagerly(why)
                assert self._find.eager is not None
                self._find.eager.prepare(args, kwargs)
            else:
                self._executor.prepare(captured)

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
        """Updates so far; with a k for each optimizer, calls that updated any."""
        return self._executor.window.optimizer_step

    @property
    def pending(self) -> int:
        """Micro-steps in the open window; with a k for each optimizer, in the longest open one."""
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
        return {name: t.view_as(t) for name, t in self._executor.accumulators.sums.items()}

    def flush(self, on_update: Callable[[], Any] | None = None) -> None:
        """Closes the open window now: reduce, update, zero. Every rank calls it."""
        with self._one_thread.held(), self._losses:
            flush(self._executor, on_update)

    def skip(self) -> None:
        """This rank's micro-step without data."""
        with self._one_thread.held(), self._losses:
            skip(self._executor)

    def discard(self) -> None:
        """Drops the open window; `micro_step` keeps counting."""
        with self._one_thread.held():
            discard(self._executor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_copies()

    def state_dict(self) -> dict[str, Any]:
        """Counters, accumulators by parameter name, k, world size: plain tensors and numbers.

        What differs between ranks has the rank in its key. A run that is stopped inside a window and resumed from it
        is bitwise the run that was not.
        """
        with self._one_thread.held():
            return save(self._executor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises `StateError` with both values where it does not fit."""
        with self._one_thread.held():
            load(self._executor, state)

    def save(self, path: Place, **states: Mapping[str, Any]) -> None:
        """Writes the window to a file, with further state dicts: `model=model.state_dict(), ...`, one point in time.

        Each rank saves its own window, so each names a file of its own. The file is there whole or not at all: when
        saving fails, or the process is killed, the one that was there before stays. Raises `StateError` when it cannot
        be written, or for states that are not plain data; `WindowError` for a window that is void.
        """
        with self._one_thread.held():
            save_file(self._executor, path, states)

    def load(self, path: Place) -> dict[str, Any]:
        """Takes the window from a file of `save`, and returns the further states, by name, on the CPU.

        The caller hands them to `load_state_dict` of the model and the others. Nothing in a file is run
        (`weights_only=True`). Raises `StateError` for a file that is damaged, of another format, or does not fit;
        nothing is changed then.
        """
        with self._one_thread.held():
            return load_file(self._executor, path)

    def report(self, hardware: str | Hardware = "laptop") -> Report:
        """What the rewrite changed, for what has been captured so far. Raises `WindowError` before the first call.

        hardware: what the estimate is for; a preset's name, or what `calibrate` measured.
        """
        latest = self._executor.catalogue.latest
        if isinstance(latest, EagerStep):
            options = self._executor.options
            return describe_eager(
                latest, options, step=self._name, line=self._line, hardware=hardware
            )
        return describe(
            self._executor.captures,
            self._executor.options,
            step=self._name,
            line=self._line,
            simulated=self._simulated,
            hardware=hardware,
        )

    def self_check(self, *args: Any, **kwargs: Any) -> Verdict:
        """Runs a window both ways, captured and in plain eager PyTorch, on copies of the step and all that it touches.

        Each micro-step gets these arguments, its first rows replaced by others so that no two are alike. Nothing of
        the user's changes: objects, random numbers, this window. Every rank calls it. Raises `WindowError` for a step
        that cannot be copied, or whose windows have no one length.
        """
        refuse_other_parallelism(self._train_step, args, kwargs)
        return check(self._train_step, args, kwargs, self._executor.options, OptimizedStep)

    def capture(self, *args: Any, **kwargs: Any) -> None:
        """Captures a call with these arguments, compiling and running nothing: enough for `report`."""
        with USERS_FRAMES, self._one_thread.held():
            self._find.capture_of(args, kwargs)

    def set_gradient_accumulation_steps(self, k: Any) -> None:
        """Another window length from the next window on. Raises `WindowError` inside a window. Never recompiles."""
        with self._one_thread.held():
            set_steps(self._executor, k)


class _Finder:
    """Calls the traced step: to run it, or only to learn which capture some arguments lead to."""

    def __init__(self, train_step: Callable[..., Any], executor: Executor) -> None:
        options = executor.options
        self._executor, self._demand = executor, Demand()
        self._train_step = train_step
        self._last: tuple[Any, Any] | None = None
        self.eager: EagerWindow | None = None
        self._groups: dict[int, list[int]] = {}
        self.at_end = ExitStack()
        self._call = traced(
            train_step,
            executor.on_capture,
            decompositions(options),
            options.dynamic,
            self._demand,
            manual=options.manual,
            rank_timeout=options.rank_timeout,
            at_end=self.at_end,
        )

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """One micro-step: captured, or eagerly where that cannot be and the options allow it."""
        if self.eager is None:
            try:
                return self._captured_call(*args, **kwargs)
            except CaptureError as why:
                self.run_eagerly(why)
        assert self.eager is not None
        return self.eager.run(args, kwargs)

    def run_eagerly(self, why: CaptureError) -> None:
        """From now on without a capture. Raises `why` where the options forbid that, or eager is no way out."""
        same = isinstance(why, EITHER_WAY)
        if self._executor.options.on_unsupported != "eager" or same:
            raise why
        self.eager = EagerWindow(self._train_step, self._executor, why)

    def _captured_call(self, *args: Any, **kwargs: Any) -> Any:
        self._look_at(args, kwargs)
        # Kept while a window is open: closing it may need the step traced anew, with the same arguments.
        self._last = (args, kwargs)
        self._demand.key = self._changed_groups()
        try:
            try:
                result = self._call(*args, **kwargs)
            except Exception as failure:
                # The user's code behind the program, perhaps: then the other ranks wait for the window's second half.
                self._executor.finish()
                if not self._executor.talks:  # a second time, that would hang
                    raise_own(self._train_step, args, kwargs, failure)
                raise
            self._executor.deferred = self._demand.deferred
            if self._executor.sync_gradients:
                self._executor.make_up()
            self._executor.finish()
            return result
        finally:
            if not self._executor.window.pending:
                self._last = None

    def _look_at(self, args: Any, kwargs: Any) -> None:
        if not self._executor.captures:
            refuse_other_parallelism(self._train_step, args, kwargs)

    def _changed_groups(self) -> str:
        """What Dynamo has to trace anew for: parameters that an optimizer gained or lost since its first capture."""
        changed: dict[int, list[int]] = {}
        for captured in self._executor.captures:
            for optimizer in captured.capture.optimizers:
                groups = getattr(optimizer, "param_groups", ())
                sizes = [len(group["params"]) for group in groups]
                if self._groups.setdefault(id(optimizer), sizes) != sizes:
                    changed[id(optimizer)] = sizes
        return repr(list(changed.values())) if changed else ""

    def capture_of(self, args: Any, kwargs: Any) -> CapturedStep:
        """Captures a call without running it."""
        self._look_at(args, kwargs)
        self._executor.only_find = True
        try:
            self._call(*args, **kwargs)
        except Found as found:
            return found.captured
        except CaptureError as failure:
            raise_own(self._train_step, args, kwargs, failure)
            raise
        finally:
            self._executor.only_find = False
        raise AssertionError("a traced step ran where it was only to be found")

    def again(self, parameters: dict[str, torch.Tensor]) -> CapturedStep | None:
        """The last call of this window, traced with gradients for exactly these parameters; None without a call."""
        if self._last is None:
            return None
        self._demand.key = f"{self._changed_groups()} {list(parameters)}"
        self._demand.parameters = tuple(parameters.values())
        try:
            return self.capture_of(*self._last)
        finally:
            self._demand.key, self._demand.parameters = "", ()


def _end(executor: Executor, name: str, line: str, at_end: ExitStack) -> None:
    """Of a step that is gone."""
    warn_of_pending(executor, name, line)
    at_end.close()


def optimize(train_step: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Gradient accumulation under data parallelism, in the compiler.

    train_step: an ordinary training step (forward, `backward()`, `optimizer.step()`, in any form: function, closure,
    method), without accumulation logic. Returned is an `OptimizedStep`, called like it; without `train_step`, a
    decorator. Each call is one micro-step; every k-th call of a window is the boundary, which reduces the window's sums
    over the ranks, once, and updates.

    Keyword arguments:

    gradient_accumulation_steps (1): k, the micro-steps in a window. "manual": a call that reaches `optimizer.step()` is
        the boundary, any other accumulates. A mapping from optimizers to numbers: a window of its own for each.
    reduction ("mean"): sum(g) / n over the n micro-steps really summed on all ranks. "sum": sum(g) over the window,
        averaged over the ranks. "weighted": sum(w g) / sum(w), w from `micro_batch_weight` called in the step.
    process_group (None): the ranks; by default those of a DistributedDataParallel module in the step, else the default
        group where there is one.
    sync_each_batch (False): reduce in every micro-step; one update for each window all the same.
    bucket_cap_mb (25.0): MiB of gradients in one all-reduce. DDP's own setting counts where this one is not given. At
        25 the first bucket is closed at 1 MiB, and the others at 4 on the CPU: the wire starts early.
    accumulator_dtype (None): dtype of the running sums; by default float32 for parameters of lower precision, else the
        parameter's own.
    reduce_dtype (None): dtype on the wire; by default the accumulator's. The sum is rounded to it once.
    broadcast_buffers ("window_start"): when rank 0's module buffers go to the others, as in DDP under `no_sync`;
        "every" micro-step, or "never".
    skip_nonfinite (False): a micro-step whose loss or gradients are not finite adds nothing on its rank and does not
        count. Holds all gradients of a micro-step until they were looked at.
    on_unsupported ("error"): a step that cannot be captured whole: "error" names the line and the way out; "eager" runs
        the same windows without the graph rewrite, and says so once.
    rank_timeout (None): seconds that a boundary waits for the other ranks before it raises, compilation not counted;
        by default the group's own timeout.
    self_check (False): ahead of the first call, `step.self_check` with its arguments; raises `VerificationError`, with
        the verdict, where the captured window is not the plain eager one. Logged at INFO where it is.
    backend ("inductor"), mode, dynamic, options (None): how programs are lowered, as in `torch.compile`. "aot_eager"
        and "eager" run them with torch's own kernels; a callable gets (GraphModule, example inputs).
    without (()): what Inductor's programs are made without, to compare or to find a fault: "overlap" (waits behind the
        backward), "in_place" (buckets reduced where they lie), "products" (that add themselves to their sums),
        "updates" (one kernel for parameters alike), "shared_compile" (one process of a host compiles for all).

    Raises `OptionError` for an unknown argument or value. The first call traces and compiles, and raises a
    `CaptureError` that names the line where a step cannot be traced whole.
    """
    checked = Options.of(options)
    if train_step is None:
        return lambda function: OptimizedStep(function, checked)
    return OptimizedStep(train_step, checked)
