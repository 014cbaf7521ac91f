"""Calls that a captured step makes on the host once for each update, its schedulers' `step` among them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from gradsync_fx.ir.program import Program
from gradsync_fx.optim.binding import Binding
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.user_lines import warn_user


class HostCalls:
    """values: the latest of each value that such a call wants (a metric, say), by its number."""

    def __init__(self, facts: CapturedFacts, bindings: Mapping[str, Binding]) -> None:
        self._facts, self._bindings = facts, bindings
        self.values: dict[int, torch.Tensor] = {}

    def take(
        self, program: Program, results: list[Any], numbers: Collection[int], *, made: bool = True
    ) -> None:
        """Takes the values with these numbers off the end of a program's results.

        made: whether the program made its update. Without that, they are not kept.
        """
        end = len(results) - program.host_values
        if made:
            self.values |= dict(zip(numbers, results[end:], strict=True))
        del results[end:]

    def make(self, closing: frozenset[int]) -> None:
        """Schedulers step once for each update, with the latest values where they want a metric."""
        for call in self._facts.capture.host_calls:
            parts = {b.part for b in self._bindings.values() if b.optimizer is call.optimizer}
            if not closing & (parts or set(self._facts.parts)):
                continue
            wanted = {value for kind, value in call.arguments if kind != "constant"}
            if not wanted <= self.values.keys():
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
        given = self.values[value]
        if kind == "number":
            return given.item()
        # What a recorded program gives is overwritten by its next run, and this may be kept.
        return given if given.device.type == "cpu" else given.clone()
