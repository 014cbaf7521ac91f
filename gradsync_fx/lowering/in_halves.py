"""A program in two halves at run time: its reductions start, and its update is made, or not.

args -> start -> Begun -> finish -> results
                       -> refuse -> results of a call without an update
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from gradsync_fx.comm.arrivals import ARRIVALS, Arrival
from gradsync_fx.comm.flat_bucket import buckets_in_use
from gradsync_fx.ir.ops import WAIT
from gradsync_fx.passes.rewritten import Halves


_Run = Callable[[list[Any]], Any]


class InTwo(Protocol):
    """A compiled program of which the update may be left out."""

    def start(self, args: list[Any]) -> Any:
        """All but the update."""

    def finish(self, begun: Any) -> list[Any]:
        """The update; returns the program's results."""

    def refuse(self, begun: Any) -> list[Any]:
        """The results without an update."""


@dataclass(frozen=True, slots=True)
class Begun:
    """A program whose first half has run. args: of the program. inputs: of its graph. first: what the half gave."""

    args: list[Any]
    inputs: list[Any]
    first: list[Any]


@dataclass(frozen=True, slots=True)
class InHalves:
    """A compiled program in two halves; called, it runs both.

    vector: makes the inputs of its graph of those of the program; None where they are the same. after: what the host
    runs when both are done, with the program's inputs and the outputs behind `outputs` of them.
    """

    halves: Halves
    first: _Run
    second: _Run | None
    outputs: int
    vector: Callable[[list[Any]], list[Any]] | None = None
    after: Callable[[list[Any], list[Any]], None] | None = None

    def __call__(self, args: list[Any]) -> list[Any]:
        return self.finish(self.start(args))

    def start(self, args: list[Any]) -> Begun:
        """The micro-step, the sums, and the start of their reductions."""
        args = list(args)
        inputs = self.vector(args) if self.vector is not None else args
        first = self.first([inputs[i] for i in self.halves.first_inputs])
        return Begun(args, inputs, list(first))

    def finish(self, begun: Begun) -> list[Any]:
        """The update. Parameters that are gathered behind it are on their way then."""
        second: Sequence[Any] = ()
        if self.second is not None:
            second = self.second(self.halves.given(begun.inputs, begun.first))
        results = self.halves.whole(begun.inputs, begun.first, second)
        if self.after is not None:
            self.after(begun.args, results[self.outputs :])
        held = {"input": begun.inputs, "first": begun.first, "second": second}
        for hidden in self.halves.hidden:
            parameters = [(name, begun.inputs[i]) for i, name in hidden.parameters]
            given = [held[kind][i] for kind, i in hidden.inputs]
            ARRIVALS.add(Arrival(parameters, partial(hidden.module, *given)))
        return results[: self.outputs]

    def refuse(self, begun: Begun) -> list[Any]:
        """No update: what was started is waited for. What only the update could give is NaN, or 0 for integers."""
        for i in self.halves.started:
            WAIT(begun.first[i])
        buckets_in_use().wait_for_all()
        held = {"input": begun.inputs, "first": begun.first}
        sizes = sizes_among(self.halves.inputs, begun.inputs)
        return [
            nothing_like(form, sizes)
            if kind == "second"
            else value
            if kind == "constant"
            else held[kind][value]
            for (kind, value), form in zip(
                self.halves.results[: self.outputs], self.halves.forms, strict=False
            )
        ]


def sizes_among(forms: Sequence[Any], inputs: Sequence[Any]) -> dict[Any, int]:
    """The symbols of a graph's sizes, each with its number in a call. forms: fake values of the inputs."""
    return {
        form.node.expr: value
        for form, value in zip(forms, inputs, strict=True)
        if isinstance(form, torch.SymInt)
    }


def nothing_like(form: torch.Tensor, sizes: dict[Any, int]) -> torch.Tensor:
    """A tensor of NaN, or of 0 for integers, in the form of a fake value."""
    fill = float("nan") if form.dtype.is_floating_point or form.dtype.is_complex else 0
    wanted: list[Any] = list(form.shape)
    shape = [int(n.node.expr.subs(sizes)) if isinstance(n, torch.SymInt) else n for n in wanted]
    return torch.full(shape, fill, dtype=form.dtype, device=form.device)
