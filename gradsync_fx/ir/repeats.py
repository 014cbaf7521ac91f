"""Tandem repeats in a sequence: stretches in which one piece comes again and again, as layers do in a traced model.

    a b  x y z  x y z  x y z  x y  c   ->   start 2, period 3, count 3, slack 2

A stretch of period p is where the sequence equals itself p places on; so a candidate period costs one comparison of the
whole, and candidates are the distances at which tokens come back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch


_CANDIDATES = 32  # periods tried, the likeliest first


@dataclass(frozen=True, slots=True)
class Stretch:
    """A piece of `period` tokens that stands `count` times in a row. slack: by how many tokens it may begin later."""

    start: int
    period: int
    count: int
    slack: int

    @property
    def saved(self) -> int:
        """Tokens that are repetitions."""
        return (self.count - 1) * self.period


def stretches_of(tokens: Sequence[int], least: int) -> list[Stretch]:
    """Stretches that do not overlap, in their order. least: tokens that have to be repetitions for one to count.

    The largest one first, then what is left on both sides of it.
    """
    return sorted(_found(tokens, 0, least), key=lambda s: s.start)


def _found(tokens: Sequence[int], offset: int, least: int) -> Iterator[Stretch]:
    best = _best(tokens)
    if best is None or best.saved < least:
        return
    end = best.start + best.count * best.period + best.slack
    yield Stretch(best.start + offset, best.period, best.count, best.slack)
    yield from _found(tokens[: best.start], offset, least)
    yield from _found(tokens[end:], offset + end, least)


def _best(tokens: Sequence[int]) -> Stretch | None:
    """The stretch that saves most; of two equal ones that with the shorter period."""
    whole = torch.tensor(tokens)
    found = [s for p in _periods(tokens) if (s := _longest(whole, p)) is not None]
    return max(found, key=lambda s: (s.saved, -s.period), default=None)


def _periods(tokens: Sequence[int]) -> list[int]:
    """Distances between equal tokens, those that explain most of the sequence first."""
    last: dict[int, int] = {}
    counts: Counter[int] = Counter()
    for place, token in enumerate(tokens):
        if token in last:
            counts[place - last[token]] += 1
        last[token] = place
    ranked = sorted(counts, key=lambda distance: (-counts[distance] * distance, distance))
    return ranked[:_CANDIDATES]


def _longest(whole: torch.Tensor, period: int) -> Stretch | None:
    """The longest stretch of a period, where it stands at least twice."""
    differs = (whole[:-period] != whole[period:]).nonzero().flatten()
    edges = torch.cat([torch.tensor([-1]), differs, torch.tensor([len(whole) - period])])
    equal = edges.diff() - 1
    at = int(equal.argmax())
    length = int(equal[at]) + period
    count = length // period
    if count < 2:
        return None
    return Stretch(int(edges[at]) + 1, period, count, length - count * period)
