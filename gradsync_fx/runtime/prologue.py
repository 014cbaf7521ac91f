"""What a captured step holds for a window: values that its prologue computes, and sums that its fold hands on.

a call comes -> is what the values are made of as it was? -> no: fold the sums so far, run the prologue
                                                          -> yes: nothing
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch

from gradsync_fx.planning.kept import NOTHING
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.program_cache import CompiledProgram, ProgramCache
from gradsync_fx.runtime.writes_seen import Snapshot


log = logging.getLogger(__name__)


class HeldForWindow:
    """values: by their numbers, empty before the first window. sums: taken ahead of linear work, by name.

    run: runs a compiled program on the step's flat inputs.
    """

    def __init__(
        self,
        facts: CapturedFacts,
        programs: ProgramCache,
        integrity: Integrity,
        run: Callable[[CompiledProgram, Sequence[Any]], None],
    ) -> None:
        self._facts, self._programs, self._run = facts, programs, run
        self._integrity = integrity
        self.values: list[torch.Tensor] = []
        self.sums: dict[str, torch.Tensor] = {}
        self._made_of: Snapshot | None = None
        self._for = NOTHING
        self._part_of: dict[str, int] = {}
        self._open = False  # whether sums may hold terms

    def ready(self, args: Sequence[Any], *, sums: bool) -> None:
        """Before a program that reads what is held. sums: it adds to the early sums, too."""
        kept = self._programs.kept
        if self._for is not kept:
            self.fold()
            self._make_room()
            self._for, self._made_of = kept, None
        watched = [args[i] for i in kept.watched]
        if self._made_of is None or not self._made_of.matches(watched):
            self.fold()
            self._made_of = None
            self._run(self._programs.prologue(), args)
            self._made_of = Snapshot(watched)
            log.debug("held %d values anew", len(self.values))
        self._open = self._open or sums

    def fold(self) -> None:
        """Puts what was summed early into the accumulators, by the parameters that it was summed with."""
        if self._open:
            with self._integrity.summing():
                self._run(self._programs.fold(), [])
                self._open = False

    def drop(self, parts: Collection[int]) -> None:
        """The terms of these parts of the window are done with, or go; parameters are others from here on."""
        self._made_of = None
        if self._open:
            gone = [total for name, total in self.sums.items() if self._part_of[name] in parts]
            for total in gone:
                total.zero_()
            self._open = len(gone) < len(self.sums)

    def _make_room(self) -> None:
        kept, leaves = self._programs.kept, self._facts.capture.step.leaves
        self.values = [_room(node.meta["val"]) for node in kept.held]
        early = kept.sums(leaves)
        of = self._facts.part_of_leaf
        parts = [of[next(iter(d.others))] for d in kept.deferred for _ in d.sources]
        self._part_of = dict(zip((leaf.name for leaf in early.values()), parts, strict=True))
        self.sums.clear()
        self.sums.update({leaf.name: _room(leaf.parameter) for leaf in early.values()})


def _room(form: torch.Tensor) -> torch.Tensor:
    shape, strides = tuple(form.shape), form.stride()
    return torch.empty_strided(shape, strides, dtype=form.dtype, device=form.device).zero_()
