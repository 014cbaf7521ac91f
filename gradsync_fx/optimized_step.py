"""`OptimizedStep`, what `optimize` returns: called like the step, with controls and state of its window."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload

import torch

from gradsync_fx.capture.parallelism import refuse_other_parallelism
from gradsync_fx.checking.self_check import Verdict, check
from gradsync_fx.comm.arrivals import ARRIVALS
from gradsync_fx.comm.rank_failure import NamedLosses
from gradsync_fx.dispatch import Dispatch, warn_of_mistakes
from gradsync_fx.eager.own_errors import USERS_FRAMES
from gradsync_fx.inspection.costs import Hardware
from gradsync_fx.inspection.remarks import mistakes
from gradsync_fx.inspection.report import Report
from gradsync_fx.lowering.torch_trace import add_to_trace
from gradsync_fx.options import Options
from gradsync_fx.progress import LongCall
from gradsync_fx.runtime.atomic_files import FilePath
from gradsync_fx.runtime.ballot import without_the_step
from gradsync_fx.runtime.bound_steps import bound_step
from gradsync_fx.runtime.checkpoint import load, load_file, load_files, save, save_file
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.export import export
from gradsync_fx.runtime.refusals import no_copies
from gradsync_fx.runtime.update_watch import tell
from gradsync_fx.runtime.window_ops import (
    discard,
    flush,
    set_steps,
    skip,
    warn_of_pending,
)
from gradsync_fx.threads import OneAtATime
from gradsync_fx.wording import number_of


log = logging.getLogger(__name__)
P = ParamSpec("P")  # of the step's arguments; Q: of a method's, without the object
Q = ParamSpec("Q")
R = TypeVar("R")


class OptimizedStep(Generic[P, R]):
    """What `optimize` returns: call it like the step; it also shows and controls the window.

    >>> step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
    >>> for x, y in batches:
    ...     loss = step(model, optimizer, x, y)
    >>> step.micro_step, step.optimizer_step, step.pending
    (3, 1, 1)
    >>> step.flush()
    """

    def __init__(
        self, train_step: Callable[P, R], options: Options, simulated: int | None = None
    ) -> None:
        functools.update_wrapper(self, train_step)
        # The finalizer below needs these when this object is gone.
        self._name = getattr(train_step, "__name__", type(train_step).__name__)
        self._one_thread = OneAtATime(
            f"step {self._name!r}",
            fix="make a step for each thread: gradsync_fx.optimize(train_step, ...)",
        )
        self._commit = options.commit
        if options.commit is not None:
            alone = without_the_step(options.commit, self._one_thread, self._name)
            options = replace(options, commit=alone)
        self._executor = Executor(options, simulated)
        self._losses = NamedLosses(self._executor.place, self._executor.absent)
        self._to_check = options.self_check
        self._verbose = options.verbose and simulated is None
        self._simulated, self._train_step = simulated is not None, train_step
        self._dispatch = Dispatch(train_step, self._executor)
        code = getattr(train_step, "__code__", None)
        self._line = f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
        weakref.finalize(self, _end, self._executor, self._name, self._line, self._dispatch.at_end)

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...
    @overload
    def __get__(
        self: OptimizedStep[Concatenate[Any, Q], R], instance: object, owner: type | None = None
    ) -> OptimizedStep[Q, R]: ...
    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """As a decorated method: each object has a step, and a window, of its own.

        Raises `WindowError` for objects that cannot hold one, having `__slots__` and no `__dict__`.
        """
        bind = getattr(type(self._train_step), "__get__", None)
        if instance is None or bind is None:
            return self
        method = bind(self._train_step, instance, owner)
        if method == self._train_step:  # another object's by now
            return self
        return bound_step(self, self._name, instance, lambda: type(self)(method, self._options()))

    def _options(self) -> Options:
        """As they are now, for a step of another object."""
        return replace(self._executor.options, commit=self._commit)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """One micro-step, with the arguments of the step; every k-th call of a window is the boundary.

        Returns what the step returns, tensors detached; of an output that only the boundary computes (a clipped norm,
        say) a NaN of its shape on other calls. Raises `CaptureError` for a step that cannot be traced whole,
        `RanksDisagreeError` and `RankLostError` for ranks apart, `WindowError` for a window that is void; what the
        step itself raises is raised as it is.
        """
        with USERS_FRAMES, self._one_thread.held(), self._losses, LongCall(self._verbose):
            executor = self._executor
            if self._to_check:
                verdict = self.self_check(*args, **kwargs)
                log.info("%s", verdict)
                verdict.require()
                self._to_check = False
            first = executor.setting is None
            executor.integrity.check(self._name)
            ARRIVALS.check()
            executor.accumulators.drop_gradients()
            result: R = self._dispatch.call(args, kwargs)
            executor.raise_refusal()
            if first:
                executor.accumulators.drop_gradients()
                warn_of_mistakes(executor)
            if executor.window.optimizer_step == 1 and executor.sync_gradients:
                add_to_trace(self._name, "report", lambda: self.report().to_json())
            tell(executor.watch)
            return result

    def prepare(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Captures and compiles for these arguments without running anything. Raises what a first call raises.

        >>> step.prepare(model, optimizer, x, y)
        >>> step.micro_step
        0
        """
        with USERS_FRAMES, self._one_thread.held(), self._losses, LongCall(self._verbose):
            self._dispatch.prepare(args, kwargs)

    def export(self, path: FilePath) -> None:
        """Writes an artifact: what was compiled so far, for `optimize(..., artifact=path)` on ranks and machines alike.

        With `shard_optimizer` each rank has programs of its own, and writes a file of its own. Raises `WindowError`
        before a first call or `prepare`, `OptionError` where a backend other than Inductor compiles, `StateError`
        where torch's caches are off or the file cannot be written.

        >>> step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
        >>> step.prepare(model, optimizer, x, y)
        >>> step.export(path)
        >>> loaded = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2, artifact=path)
        """
        with self._one_thread.held(), LongCall(self._verbose):
            export(self._executor.catalogue.captures, self._executor.options, path)

    @property
    def sync_gradients(self) -> bool:
        """Whether the last call was a boundary."""
        return self._executor.sync_gradients

    @property
    def micro_step(self) -> int:
        """Calls so far, and slots without data. A number, 0 before the first."""
        return self._executor.window.micro_step

    @property
    def optimizer_step(self) -> int:
        """Updates so far; with a k for each optimizer, calls that updated any."""
        self._executor.settle()
        return self._executor.window.optimizer_step

    @property
    def pending(self) -> int:
        """Micro-steps in the open window; with a k for each optimizer, in the longest open one."""
        return self._executor.window.pending

    @property
    def compile_count(self) -> int:
        """Programs compiled so far, the tail program included."""
        return sum(len(c.programs) for c in self._executor.catalogue.captures)

    @property
    def programs(self) -> dict[str, torch.fx.GraphModule]:
        """Name ("accumulate", "boundary", "tail") to graph before lowering, of the latest capture that has it.

        Empty before the first call or `prepare`, and for a step that runs eagerly.
        """
        found: dict[str, torch.fx.GraphModule] = {}
        for captured in self._executor.catalogue.captures:
            found.update({name: p.module for name, p in captured.programs.by_name.items()})
        return found

    def gradients(self) -> Mapping[str, torch.Tensor]:
        """Parameter name to its running sum: a view, of the parameter's shape and the accumulator's dtype.

        What a window has summed so far on this rank, neither reduced nor divided; zeros after its end.

        >>> loss = step(model, optimizer, x, y)
        >>> step.gradients()["weight"].shape == model.weight.shape
        True
        """
        with self._one_thread.held():
            sums = self._executor.summed_in_place()
            return {name: t.view_as(t) for name, t in sums.items()}

    def flush(self, on_update: Callable[[], Any] | None = None) -> None:
        """Closes the open window now: reduce, update, zero. Every rank calls it, when its data has ended.

        A rank that is done earlier participates in the others' windows, with nothing to add, until all have called it.
        on_update: called without arguments after every update made inside. Raises `WindowError` where this rank has
        captured nothing yet, and `RankLostError` where another one never comes.

        >>> loss = step(model, optimizer, x, y)
        >>> step.flush()
        >>> step.optimizer_step, step.pending
        (1, 0)
        """
        with self._one_thread.held(), self._losses, LongCall(self._verbose):
            flush(self._executor, on_update)

    def settle(self) -> None:
        """Waits until parameters are new everywhere; with `overlap_param_gather` they may be on their way after a call.

        From here to the next call they may be read and written in any way. Without that option there is nothing to wait
        for. Raises `WindowError` where one was written while it was on its way.

        >>> loss = step(model, optimizer, x, y)
        >>> step.settle()
        >>> averaged = torch.optim.swa_utils.AveragedModel(model)
        """
        with self._one_thread.held(), self._losses:
            self._executor.settle_all()

    def request_stop(self) -> None:
        """Asks all ranks to stop; it only sets a flag, and a signal handler may call it.

        >>> step.request_stop()
        >>> loss = step(model, optimizer, x, y)
        >>> step.stop_requested  # the window has not ended
        False
        """
        self._executor.ask_to_stop()

    @property
    def stop_requested(self) -> bool:
        """Whether a rank's `request_stop` has reached all: True at the same call on each, where a window ended."""
        return self._executor.stop_agreed

    def skip(self) -> None:
        """This rank's micro-step without data: a slot of the window, with nothing in the sum nor in the divisor.

        In the last slot it is the boundary. Raises `WindowError` before this rank's first call or `prepare`, and
        where the step itself says when a window ends.

        >>> loss = step(model, optimizer, x, y)
        >>> step.skip()
        >>> step.sync_gradients
        True
        """
        with self._one_thread.held(), self._losses, LongCall(self._verbose):
            skip(self._executor)

    def discard(self) -> None:
        """Drops the open window; `micro_step` keeps counting. On every rank, or the next boundary raises.

        >>> loss = step(model, optimizer, x, y)
        >>> step.discard()
        >>> step.micro_step, step.pending
        (1, 0)
        """
        with self._one_thread.held():
            discard(self._executor)

    def __repr__(self) -> str:
        window, given = self._executor.window, self._executor.options.gradient_accumulation_steps
        k: object = given
        if isinstance(given, Mapping):
            k = ", ".join(f"{n} for {type(o).__name__}" for o, n in given.items())
        named = getattr(self, "__qualname__", self._name)
        pending = f"{number_of(window.pending, 'micro-step')} pending"
        so_far = f"{pending}, {number_of(window.optimizer_step, 'update')}"
        return f"<{type(self).__name__} {named}: k={k}, {self._dispatch}, {so_far}>"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise no_copies()

    def state_dict(self) -> dict[str, Any]:
        """Counters, accumulators by parameter name, k, world size: plain tensors and numbers.

        What differs between ranks has the rank in its key. A run that is stopped inside a window and resumed from it
        is bitwise the run that was not. Raises `WindowError` for a window that is void.

        >>> loss = step(model, optimizer, x, y)
        >>> resumed = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
        >>> resumed.load_state_dict(step.state_dict())
        >>> resumed.pending
        1
        """
        with self._one_thread.held():
            return save(self._executor)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes what `state_dict` gave. Raises `StateError` with both values where it does not fit; all stays then."""
        with self._one_thread.held():
            load(self._executor, state)

    def save(self, path: FilePath, **states: Mapping[str, Any]) -> None:
        """Writes the window to a file, with further state dicts: `model=model.state_dict(), ...`, one point in time.

        Each rank saves its own window, so each names a file of its own. The file is there whole or not at all: when
        saving fails, or the process is killed, the one that was there before stays. Raises `StateError` when it cannot
        be written, or for states that are not plain data; `WindowError` for a window that is void.

        >>> step.save(path, model=model.state_dict(), optimizer=optimizer.state_dict())
        >>> states = step.load(path)
        >>> sorted(states)
        ['model', 'optimizer']
        """
        with self._one_thread.held():
            save_file(self._executor, path, states)

    def load(self, path: FilePath | Sequence[FilePath]) -> dict[str, Any]:
        """Takes the window from a file of `save`, and returns the further states, by name, on the CPU.

        path: this rank's file; or those of all ranks, in order, which another number of ranks share out. The caller
        hands the states to `load_state_dict` of the model and the others. Nothing in a file is run
        (`weights_only=True`). Raises `StateError` for a file that is damaged, of another format, or does not fit;
        nothing is changed then.
        """
        with self._one_thread.held():
            if isinstance(path, str | os.PathLike):
                return load_file(self._executor, path)
            return load_files(self._executor, path)

    def report(self, hardware: str | Hardware = "laptop") -> Report:
        """What the rewrite changed, for what has been captured so far. Raises `WindowError` before the first call.

        hardware: what the estimate is for; a preset's name, or what `calibrate` measured. Its figures are bytes and
        seconds. Raises `OptionError` for a preset that does not exist.

        >>> step.prepare(model, optimizer, x, y)
        >>> step.report().k
        2
        """
        self._executor.settle_all()
        return self._dispatch.report(self._name, self._line, self._simulated, hardware)

    def self_check(self, *args: P.args, **kwargs: P.kwargs) -> Verdict:
        """Runs a window both ways, captured and in plain eager PyTorch, on copies of the step and all that it touches.

        Each micro-step gets these arguments, its first rows replaced by others so that no two are alike. Nothing of
        the user's changes: objects, random numbers, this window. Every rank calls it. Raises `WindowError` for a step
        that cannot be copied, or whose windows have no one length.

        >>> bool(step.self_check(model, optimizer, x, y))
        True
        """
        refuse_other_parallelism(self._train_step, args, kwargs)
        self._executor.settle_all()
        with LongCall(self._verbose):
            return check(
                self._train_step, args, kwargs, self._executor.options, OptimizedStep, _mistakes_of
            )

    def capture(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Captures a call with these arguments, compiling and running nothing: enough for `report`."""
        with USERS_FRAMES, self._one_thread.held(), LongCall(self._verbose):
            self._dispatch.capture_of(args, kwargs)

    def set_gradient_accumulation_steps(self, k: Any) -> None:
        """Another window length from the next window on. Never recompiles.

        k: of the kind that `optimize` was given: a number of micro-steps, or a mapping from the same optimizers to
        numbers. Raises `WindowError` inside a window and for another kind, `OptionError` for what is no such value.

        >>> step.set_gradient_accumulation_steps(8)
        """
        with self._one_thread.held():
            set_steps(self._executor, k)


def _mistakes_of(step: OptimizedStep) -> tuple[str, ...]:
    return mistakes(step._executor.catalogue.captures, step._executor.options)


def _end(executor: Executor, name: str, line: str, at_end: ExitStack) -> None:
    """The finalizer of a step: warns of a window that is lost, and releases what Dynamo holds."""
    executor.settle_all()
    warn_of_pending(executor, name, line)
    at_end.close()
