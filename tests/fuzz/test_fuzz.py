"""A bounded, seeded part of the fuzzing; `python -m tests.fuzz` runs as much as there is time for."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from tests.eagerly import asked
from tests.fuzz import worlds
from tests.fuzz.cases import Case
from tests.fuzz.plain import compare
from tests.fuzz.play import play
from tests.fuzz.strategies import cases
from tests.workers import Ranks


BOUNDED = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}
pytestmark = pytest.mark.skipif(asked(), reason="cases say themselves which way they are run")


@settings(max_examples=25, **BOUNDED)
@given(case=cases())
def test_one_rank(case: Case) -> None:
    torch.compiler.reset()
    compare(case, [play(0, case)])


@pytest.mark.gloo
@settings(max_examples=8, **BOUNDED)
@given(case=cases(ranks=2))
def test_two_ranks(ranks: Ranks, case: Case) -> None:
    compare(case, ranks(play, case))


@pytest.mark.captured
@settings(max_examples=34, **BOUNDED)
@given(case=worlds.worlds())
def test_effects_under_random_optimizers(case: worlds.Case) -> None:
    torch.compiler.reset()
    assert worlds.same([worlds.play(0, case)])


@pytest.mark.gloo
@settings(max_examples=6, **BOUNDED)
@given(case=worlds.worlds(ranks=2))
def test_effects_on_two_ranks(ranks: Ranks, case: worlds.Case) -> None:
    assert worlds.same(ranks(worlds.play, case))
