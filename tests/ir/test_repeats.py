"""Tandem repeats in sequences."""

from __future__ import annotations

import random

from gradsync_fx.ir.repeats import Stretch, stretches_of


def tokens(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_a_piece_that_comes_again() -> None:
    assert stretches_of(tokens("ab" + "xyz" * 3 + "xyc"), 4) == [Stretch(2, 3, 3, 2)]


def test_two_stretches_and_what_is_between() -> None:
    found = stretches_of(tokens("a" + "klm" * 4 + "bcd" + "pqrs" * 3 + "e"), 4)
    assert found == [Stretch(1, 3, 4, 0), Stretch(16, 4, 3, 0)]


def test_the_shortest_period() -> None:
    (found,) = stretches_of(tokens("abab" * 5), 4)
    assert (found.period, found.count) == (2, 10)


def test_tokens_that_come_more_than_once_in_a_piece() -> None:
    (found,) = stretches_of(tokens("vmvvav" * 6), 4)
    assert (found.period, found.count) == (6, 6)


def test_too_few_repetitions_are_none() -> None:
    assert stretches_of(tokens("xyz" * 3), 7) == []
    assert stretches_of(tokens("abcdefg"), 1) == []
    assert stretches_of([], 1) == []
    assert stretches_of([7], 1) == []


def test_stretches_are_what_they_say() -> None:
    """Random sequences: each stretch repeats, wherever within its slack it begins, and none overlaps another."""
    source = random.Random(0)
    for _ in range(50):
        sequence: list[int] = []
        while len(sequence) < 120:
            piece = [source.randrange(5) for _ in range(source.randrange(1, 9))]
            sequence += piece * source.choice((1, 1, 3, 6))
        found, end = stretches_of(sequence, 6), 0
        assert found
        for one in found:
            assert one.start >= end
            assert one.saved >= 6
            end = one.start + one.period * one.count + one.slack
            whole = sequence[one.start : end]
            assert whole[one.period :] == whole[: -one.period]
