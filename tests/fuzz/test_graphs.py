"""Programs sliced from random graphs keep to the specification: a bounded, seeded part of `python -m tests.fuzz`."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from tests.fuzz.graphs import Sketch
from tests.fuzz.slices import play
from tests.fuzz.strategies import sketches
from tests.fuzz.test_fuzz import BOUNDED
from tests.scenarios.once import all_of_it


@pytest.mark.captured
@settings(max_examples=60, **BOUNDED)
@given(sketch=sketches())
def test_graphs(sketch: Sketch) -> None:
    play(sketch)
    with all_of_it():  # and with all held that can be
        play(sketch)
