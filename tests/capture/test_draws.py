"""Draws of the host, without a trace: foreseen, made, and undone."""

from __future__ import annotations

import gc
import random

import pytest
import torch

from gradsync_fx.capture.draws import DRAWN, Draw, HostDraws


FLIP, DIE, TENSOR = Draw(random.random), Draw(random.randint, (1, 6)), Draw(torch.rand, ((),))


def seeded() -> None:
    random.seed(1)
    torch.manual_seed(2)


def drawn() -> list[float]:
    seeded()
    return [random.random(), random.randint(1, 6), torch.rand([]).item()]


def known() -> tuple[HostDraws, list[float]]:
    """A trace that drew all three."""
    draws = HostDraws()
    seeded()
    draws.begin()
    draws.place((FLIP,))
    draws.place((FLIP, DIE))
    series, _ = draws.place((FLIP, DIE, TENSOR))
    return draws, DRAWN[series]


def test_a_trace_sees_what_the_call_would_draw() -> None:
    assert known()[1] == drawn()


def test_the_beginning_of_a_known_series_is_no_other_one() -> None:
    draws, values = known()
    assert DRAWN[draws.place((FLIP, DIE))[0]] is values
    assert DRAWN[draws.place((FLIP, FLIP))[0]] is not values


def test_foreseeing_leaves_the_generators_as_they_were() -> None:
    draws, values = known()
    wanted = drawn()
    seeded()
    values.clear()
    draws.foresee()
    assert values == wanted
    assert [random.random(), random.randint(1, 6), torch.rand([]).item()] == wanted


def test_a_program_that_fails_has_drawn_nothing() -> None:
    draws, _ = known()
    seeded()
    draws.foresee()
    with pytest.raises(RuntimeError), draws.made((FLIP, DIE, TENSOR)):
        raise RuntimeError
    assert [random.random(), random.randint(1, 6), torch.rand([]).item()] == drawn()


def test_what_a_step_drew_goes_with_it() -> None:
    known_before = set(DRAWN)
    draws, _ = known()
    assert set(DRAWN) > known_before
    del draws
    gc.collect()
    assert set(DRAWN) == known_before
