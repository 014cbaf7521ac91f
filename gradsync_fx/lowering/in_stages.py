"""A program in stages at run time: compiled pieces, and the optimizers' own steps between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch

from gradsync_fx.ir.journal import Entry, Journal
from gradsync_fx.ir.program import Kind, Program, Slot
from gradsync_fx.lowering.in_halves import Begun, InTwo, nothing_like, sizes_among
from gradsync_fx.passes.stages import Stages, cut_at_updates, is_cut


Run = Callable[[list[Any]], Any]


def in_stages(
    program: Program,
    compile_one: Callable[[Program], Run],
    live: dict[str, torch.Tensor],
    journal: Journal,
) -> Run:
    """The program compiled, in one piece or in its stages. live: the user's tensors by name."""
    if not is_cut(program):
        return compile_one(program)
    start = time.perf_counter()
    stages = cut_at_updates(program)
    spent = (time.perf_counter() - start) * 1e3
    parts = [s.program.module.graph for s in stages.stages if s.program is not None]
    before, after = len(program.module.graph.nodes), sum(len(graph.nodes) for graph in parts)
    journal.entries.append(Entry(program.name, cut_at_updates.__name__, spent, before, after))
    return Staged(program, stages, compile_one, live)


class Staged:
    """The stages as a callable, like a compiled program; its first stage may be one in two halves.

    live: the user's tensors by name.
    """

    def __init__(
        self,
        program: Program,
        stages: Stages,
        compile_one: Callable[[Program], Run],
        live: dict[str, torch.Tensor],
    ) -> None:
        self._program, self._stages, self._live = program, stages, live
        self._runs = [compile_one(s.program) if s.program else None for s in stages.stages]
        wanted = {name for what, name in stages.results if what == "given"}
        self._last_use = [self._dropped_after(i, wanted) for i in range(len(stages.stages))]

    def _dropped_after(self, number: int, wanted: set[Any]) -> list[str]:
        """What no later stage, and no result, needs."""
        later = {k for s in self._stages.stages[number + 1 :] for k in s.inputs} | wanted
        return [n for s in self._stages.stages[: number + 1] for n in s.outputs if n not in later]

    def __call__(self, args: list[Any]) -> list[Any]:
        run = self._runs[0]
        return self._go_on(args, [] if run is None else run(self._taken(0, args, {})))

    @property
    def _first(self) -> InTwo | None:
        """The first stage of a program whose update may be left out: in two halves, then."""
        return cast("InTwo | None", self._runs[0])

    def start(self, args: list[Any]) -> Begun:
        """What comes before the first update; see `InTwo`."""
        run = self._first
        return Begun(args, args, [] if run is None else [run.start(self._taken(0, args, {}))])

    def finish(self, begun: Begun) -> list[Any]:
        """The updates, and what comes between and after them."""
        run = self._first
        return self._go_on(begun.args, [] if run is None else run.finish(*begun.first))

    def refuse(self, begun: Begun) -> list[Any]:
        """The results without an update."""
        run = self._first
        first = [] if run is None else run.refuse(*begun.first)
        held = dict(zip(self._stages.stages[0].outputs, first, strict=True))
        sizes = sizes_among(self._program.inputs(), begun.args)
        for what, name in self._stages.results:
            if what == "given" and name not in held:
                held[name] = nothing_like(self._stages.forms[name], sizes)
        return list(self._results(begun.args, held))

    def _taken(self, number: int, args: list[Any], held: dict[str, Any]) -> list[Any]:
        """What the program of a stage is given."""
        stage = self._stages.stages[number]
        assert stage.program is not None
        return [
            held[key] if isinstance(key, str) else self._now(number, slot, args[key])
            for key, slot in zip(stage.inputs, stage.program.slots, strict=True)
        ]

    def _go_on(self, args: list[Any], first: list[Any]) -> list[Any]:
        """From the results of the first stage on."""
        held: dict[str, Any] = {}
        for number, stage in enumerate(self._stages.stages):
            run = self._runs[number]
            if run is not None:
                given = first if not number else run(self._taken(number, args, held))
                held.update(zip(stage.outputs, given, strict=True))
            if stage.update is not None:
                stage.update.step([held[name] for name in stage.gradients])
            for name in self._last_use[number]:
                held.pop(name, None)
        return list(self._results(args, held))

    def _now(self, number: int, slot: Slot, value: Any) -> Any:
        """An optimizer may have given a parameter another storage."""
        changed = number and slot.kind in (Kind.PARAMETER, Kind.BUFFER) and slot.name in self._live
        return self._live[slot.name].detach() if changed else value

    def _results(self, args: list[Any], held: dict[str, Any]) -> Iterator[Any]:
        for what, value in self._stages.results:
            yield held[value] if what == "given" else args[value] if what == "input" else value
