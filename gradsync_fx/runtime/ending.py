"""The end of a window, between the executor and a step: what the ranks agreed on, and what the step made of it.

executor: ranks meet -> Ending -> step.close -> Closed -> executor: the closing parts start anew
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradsync_fx.comm.rendezvous import Line, Meeting
from gradsync_fx.options import Options
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.ballot import Ballot
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.divisors import Divisors, divisors_of, totals_of
from gradsync_fx.runtime.outcome import Outcome
from gradsync_fx.runtime.window import NONE, WindowState


@dataclass(frozen=True, slots=True)
class Ending:
    """What a step is given to end a window, or some parts of it, together with all ranks.

    meeting: where the ranks stand. after: the window with this call in it. line: how this rank reaches the others.
    world: the number of ranks. ballot: where the user decides whether the update counts.
    """

    meeting: Meeting
    after: WindowState
    line: Line
    world: int
    options: Options
    accumulators: Accumulators
    integrity: Integrity
    ballot: Ballot | None = None

    def divisors(self, totals: list[float]) -> Divisors:
        """What sums are divided by. totals: of terms, or their weight, on all ranks, for each part."""
        return divisors_of(totals, self.options.reduction, self.world)

    @property
    def refused(self) -> bool:
        """Whether it was asked, and does not count."""
        return self.ballot is not None and self.ballot.refused

    def counts(self) -> bool:
        """Whether the update counts: asked once its reductions have started."""
        return self.ballot is None or self.ballot.counts()

    def totals(self, *, ready: bool, weighs: bool) -> tuple[list[float], list[int]]:
        """Asks all ranks: what their terms weigh together, by part; and which ranks are not ready to update."""
        mine = weights_summed(self.after, self.accumulators, weighs=weighs)
        rows = self.line.gather([float(ready), *mine])
        late = [rank for rank, row in enumerate(rows) if not row[0]]
        return totals_of(row[1:] for row in rows), late


@dataclass(frozen=True, slots=True)
class Closed:
    """What came of it. updated: the parts with an update. reset: those whose sums a program set to zero.

    outcome: where only the device knows whether there was an update; `updated` says which parts it would have been of.
    rest: the second half, where there is one. It may trace the step anew, and so comes when the traced call is over.
    """

    results: Sequence[Any] = ()
    updated: frozenset[int] = NONE
    reset: frozenset[int] = NONE
    outcome: Outcome | None = None
    rest: Callable[[], Closed] | None = None


def weights_summed(
    window: WindowState, accumulators: Accumulators, *, weighs: bool
) -> tuple[float, ...]:
    """What this rank's terms weigh, by part: their number, or (weighs) what the programs added up."""
    if not weighs:
        return tuple(float(part.summed) for part in window.parts)
    return tuple(float(weight) for weight in accumulators.weights.values())
