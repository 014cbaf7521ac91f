"""What a window's sums are divided by, from what the ranks say of their terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


Divisors = dict[tuple[str, int], float]


def totals_of(ranks: Iterable[Sequence[float]]) -> list[float]:
    """The number of terms, or their weight, of all ranks together, for each part of the window."""
    return [sum(column) for column in zip(*ranks, strict=True)]


def divisors_of(totals: list[float], reduction: str, world: int) -> Divisors:
    """For each part: of sums over the ranks ("ranks"), and of what the step's own code averages ("local")."""
    summing = reduction == "sum"
    found: Divisors = {}
    for part, total in enumerate(totals):
        found["ranks", part] = float(world) if summing else total
        found["local", part] = 1.0 if summing else total / world
    return found
