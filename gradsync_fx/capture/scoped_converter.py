"""Dynamo's frame converter for a step: intercepted while it traces, and wiser with each trace that fails.

trace -> it ends at a call that could wait, a list that could be read, a branch on a number that could be drawn ahead
      -> the next trace of the same call takes it so
"""

from __future__ import annotations

from typing import Any

from torch import nn

from gradsync_fx._torch import TorchDynamoException, forget_constant_numbers
from gradsync_fx.capture.drawn_numbers import asks_for_a_number
from gradsync_fx.capture.draws import HostDraws
from gradsync_fx.capture.markers import Demand
from gradsync_fx.capture.patches import intercepting
from gradsync_fx.capture.reachable import discover
from gradsync_fx.capture.trace_state import CallSite, Observed
from gradsync_fx.comm.liveness import compiling
from gradsync_fx.progress import stage
from gradsync_fx.wording import name_of


class ScopedConverter:
    """Dynamo's frame converter, with the interception in force while it traces and at no other time."""

    def __init__(
        self, callback: Any, demand: Demand, rank_timeout: float | None, norms: bool
    ) -> None:
        self._callback, self._demand, self._rank_timeout = callback, demand, rank_timeout
        self._norms, self.draws = norms, HostDraws()
        # Dynamo's C code walks this chain while frames are intercepted: a plain attribute, no Python code may run.
        self._torchdynamo_orig_backend = callback._torchdynamo_orig_backend
        self._after_program: frozenset[CallSite] = frozenset()
        self._read_lists: frozenset[int] = frozenset()
        self._symbols: frozenset[str] = frozenset()
        self._left_to_host: frozenset[str] = frozenset()
        self._on_host: frozenset[CallSite] = frozenset()
        self._learned = False
        self._asked: Exception | None = None  # what put those on the host, until a trace succeeds
        self.called: tuple[Any, ...] = ()  # the step and its arguments, while it is called

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fresh = Observed(self._demand.parameters, self._after_program, self._read_lists)
        fresh.symbols, fresh.within_reach = self._symbols, self._within_reach()
        fresh.left_to_host = self._left_to_host
        fresh.norms = [] if self._norms else None
        fresh.host_draws, fresh.on_host = self.draws, self._on_host
        fresh.function = self.called[0] if self.called else None
        self.draws.begin()
        forget_constant_numbers()  # torch keeps them by symbol, and another trace's have the same
        of = name_of(self.called[0]) if self.called else "the step"
        with stage(f"tracing {of}"), compiling(self._rank_timeout), intercepting(fresh) as seen:
            try:
                result = self._callback(*args, **kwargs)
                self._asked = None
                return result
            except Exception as failure:
                self._learned = self._learn(seen, failure)
                if self._learned:
                    raise
                if seen.refusal is not None:
                    raise seen.refusal from None
                if self._asked is not None:
                    # The numbers were used as tensors, too, or were not what the branch asked for.
                    raise self._asked from None
                # Dynamo's own: one of the step has another form.
                if isinstance(failure, AssertionError):
                    raise TorchDynamoException(f"AssertionError: {failure}") from failure
                raise
            finally:
                # The program's closure holds what was seen: it must not hold the user's objects.
                seen.function = None
                seen.rebound.clear()

    def _within_reach(self) -> list[tuple[str, nn.Module]]:
        try:
            return discover(*self.called).roots()
        except TypeError:
            return []  # it does not take these arguments, as the trace is about to find

    def _learn(self, seen: Observed, failure: Exception) -> bool:
        before = self._known()
        self._read_lists, self._symbols = seen.read_lists, seen.symbols
        self._left_to_host = seen.left_to_host
        if seen.could_wait is not None:
            self._after_program |= {seen.could_wait}
        if asks_for_a_number(failure) and seen.scalar_draws - self._on_host:
            self._on_host, self._asked = self._on_host | seen.scalar_draws, failure
        return before != self._known()

    def _known(self) -> tuple[Any, ...]:
        learned = self._read_lists, self._symbols, self._left_to_host
        return self._after_program, self._on_host, *learned

    def try_again(self) -> bool:
        """Whether the trace that failed last would fare better now, at a call that can wait (deferred_calls.py)."""
        learned, self._learned = self._learned, False
        return learned
