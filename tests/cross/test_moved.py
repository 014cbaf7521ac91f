"""Bytes moved for each element of a parameter: as many as are counted by hand, and more without an optimization."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.cross.cases import MICRO_STEPS, Case, plain
from tests.cross.conftest import Lower
from tests.cross.moved import fewest, moved
from tests.cross.results import Lowered


pytestmark = [pytest.mark.cross, pytest.mark.captured]
MLP = Case("mlp", programs=MICRO_STEPS)
MATRICES = 64 * 128 + 128 * 128 + 128 * 32  # the MLP's
SHARE = MATRICES / (
    MATRICES + 128 + 2 * 128 + 128 + 32
)  # of all elements, with biases and LayerNorm
TERM = 2 * 4  # a sum in float32 is read and written
# Sum, parameter and momenta in float32 are read; parameter and momenta are written, and the sum with zero.
UPDATES = {"sgd": (3 + 3) * 4, "adamw": (4 + 4) * 4}


def bytes_of(made: dict[str, Lowered]) -> dict[str, Any]:
    return {name: pytest.approx(moved(program), abs=0.01) for name, program in made.items()}


@pytest.mark.parametrize("optimizer", UPDATES)
def test_no_more_is_moved_than_has_to_be(optimizer: str, lower: Lower) -> None:
    case = replace(MLP, optimizer=optimizer)
    made = lower(replace(plain("mlp"), programs=MICRO_STEPS) if case == MLP else case)
    by_hand = {"accumulate": TERM, "boundary": TERM + UPDATES[optimizer]}
    assert bytes_of(made) == by_hand
    assert {name: fewest(program) for name, program in made.items()} == by_hand


def test_a_norm_reads_the_sums_once_more(lower: Lower) -> None:
    made = lower(replace(MLP, clip=True, programs=("boundary",)))["boundary"]
    assert moved(made) == pytest.approx(TERM + 4 + UPDATES["adamw"], abs=0.01)
    assert fewest(made, clip=True) == TERM + 4 + UPDATES["adamw"]


def test_the_gradient_of_an_embedding_is_counted(lower: Lower) -> None:
    """It is filled with zeros, added to, and read: that of the GPT's words."""
    made = lower(replace(plain("gpt"), programs=("accumulate",)))["accumulate"]
    words, whole = (
        sum(n for name, (n, _) in made.sizes.items() if name.startswith(kind))
        for kind in ("accumulator words.", "accumulator ")
    )
    assert moved(made) == pytest.approx(TERM + 3 * 4 * words / whole, abs=0.01)


def test_gradients_with_a_tensor_of_their_own_are_found(lower: Lower) -> None:
    """A product is written, and read where it is added."""
    made = lower(replace(MLP, without=("products",)))
    assert bytes_of(made) == {
        "accumulate": TERM + 2 * 4 * SHARE,
        "boundary": TERM + 2 * 4 * SHARE + UPDATES["adamw"],
    }


def test_buckets_that_are_put_together_are_found(lower: Lower) -> None:
    """Each sum of a matrix is written for itself, and copied."""
    made = lower(replace(MLP, without=("in_place",), programs=("boundary",)))
    assert bytes_of(made) == {"boundary": TERM + 2 * 4 * SHARE + UPDATES["adamw"]}
