"""From what the ranks saw to figures: medians with their spread, and whether all ways computed the same."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ways import WAYS


RankFound = dict[str, Any]


@dataclass(frozen=True)
class Spread:
    """Seconds: the median, and the quartiles round it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> "Spread":
        given = list(values)
        if len(given) == 1:
            return Spread(given[0], given[0], given[0])
        low, middle, high = statistics.quantiles(given, n=4, method="inclusive")
        return Spread(middle, low, high)


@dataclass(frozen=True)
class Figures:
    """One way on one workload and placement, over all ranks.

    micro_step: a window's seconds / k, of the rank that took longest. accumulate: any rank's call that is not a
    window's last. boundary: the last call, of the rank that took longest. warm_up: to the end of the second window, in
    the process that all ways share; first_calls: what is left of it without two windows' own time. deviation: the
    largest relative difference of a loss from the first peer's. A payload is one rank's and window's, in bytes; sent is
    what left the rank's interface, where it has one of its own. alone: warm-up and memory in a process of its own.
    """

    way: str
    failure: str = ""
    micro_step: Spread | None = None
    accumulate: Spread | None = None
    boundary: Spread | None = None
    warm_up: float | None = None
    first_calls: float | None = None
    deviation: float | None = None
    equal: bool = True
    traffic: dict[str, int] | None = None
    sent: float | None = None
    alone: dict[str, Any] | None = None

    @property
    def title(self) -> str:
        return WAYS[self.way].title


@dataclass(frozen=True)
class Comparison:
    """One workload at one placement. rate: of the link, in bits per second, where there is one."""

    workload: str
    placement: str
    k: int
    parameters: int
    figures: list[Figures]
    rate: float | None = None

    @property
    def fastest_peer(self) -> Figures | None:
        peers = [f for f in self.figures if f.micro_step and WAYS[f.way].peer]
        return min(peers, key=lambda f: f.micro_step.median, default=None)

    @property
    def all_equal(self) -> bool:
        return all(f.equal for f in self.figures)

    def ratio(self, figures: Figures) -> float | None:
        """Seconds of a micro-step over those of the fastest peer."""
        peer = self.fastest_peer
        if peer is None or figures.micro_step is None:
            return None
        return figures.micro_step.median / peer.micro_step.median

    def hidden(self, figures: Figures) -> float | None:
        """Of the seconds that the bytes take on the link, the share by which the boundary is not longer for them.

        Against the same programs without collectives; so only for ways that differ from those in nothing else.
        """
        way = WAYS[figures.way]
        floor = next((f for f in self.figures if f.boundary and not WAYS[f.way].reduces), None)
        if way.peer or not way.reduces or floor is None or not (figures.sent and self.rate):
            return None
        longer = figures.boundary.median - floor.boundary.median
        return 1 - longer / (8 * figures.sent / self.rate)


def compare(
    ranks: list[RankFound],
    placement: str,
    k: int,
    alone: dict[str, dict[str, Any]],
    rate: float | None = None,
) -> Comparison:
    """alone: for each way that was also run by itself, what that showed."""
    first = ranks[0]
    ran = [key for key, found in first["ways"].items() if "failure" not in found]
    truth = next((key for key in ran if WAYS[key].peer), ran[0] if ran else "")
    figures = [
        _figures(key, [rank["ways"] for rank in ranks], truth, k, alone.get(key))
        if key in ran
        else Figures(key, failure=found["failure"], alone=alone.get(key))
        for key, found in first["ways"].items()
    ]
    return Comparison(first["title"], placement, k, first["parameters"], figures, rate)


def _figures(
    key: str, ranks: list[dict[str, Any]], truth: str, k: int, alone: dict[str, Any] | None
) -> Figures:
    mine = [ways[key] for ways in ranks]
    windows = list(zip(*(found["seconds"] for found in mine), strict=True))  # of all ranks each
    boundary = [max(calls[-1] for calls in window) for window in windows]
    accumulating = [max(sum(calls[:-1]) for calls in window) for window in windows]
    micro = Spread.of((a + b) / k for a, b in zip(accumulating, boundary, strict=True))
    warm_up = max(found["warm_up"] for found in mine)
    # The copies of a way that does not reduce drift apart with their first update.
    compared = None if WAYS[key].reduces else k
    deviation = max(
        abs(loss - wanted) / abs(wanted)
        for ways in ranks
        for loss, wanted in zip(
            ways[key]["losses"][:compared], ways[truth]["losses"][:compared], strict=True
        )
    )
    sent = [found["sent"] for found in mine if found["sent"]]
    single = [call for window in windows for calls in window for call in calls[:-1]]
    return Figures(
        way=key,
        micro_step=micro,
        accumulate=Spread.of(single) if single else None,
        boundary=Spread.of(boundary),
        warm_up=warm_up,
        first_calls=max(0.0, warm_up - 2 * k * micro.median),
        deviation=deviation,
        equal=deviation <= WAYS[key].tolerance,
        traffic=mine[0]["traffic"],
        sent=statistics.median(sent[0]) if sent else None,
        alone=alone,
    )


def alone_figures(cold: list[RankFound], warm: list[RankFound], way: str, k: int) -> dict[str, Any]:
    """A way's starts by itself: with no caches on disk, then with those of its first start; memory from the latter."""
    if failure := cold[0]["ways"][way].get("failure") or warm[0]["ways"][way].get("failure"):
        return {"failure": failure}
    starts = [max(rank["ways"][way]["warm_up"] for rank in ranks) for ranks in (cold, warm)]
    two_windows = 2 * statistics.median(
        max(sum(calls) for calls in window)
        for window in zip(*(rank["ways"][way]["seconds"] for rank in cold), strict=True)
    )
    memory = [rank["ways"][way]["memory"] for rank in warm]
    return {
        "cold": starts[0],
        "compile": max(0.0, starts[0] - two_windows),
        "warm": starts[1],
        "memory": None
        if None in memory
        else {name: max(m[name] for m in memory) for name in memory[0]},
    }
