"""Ranks that have not the same number of batches: nobody hangs, and every term counts once."""

from __future__ import annotations

import pytest
import torch

from tests.scenarios import ends
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("counts", "k", "means"),
    [
        ([3, 3], 2, [(1 + 2 + 11 + 12) / 4, (3 + 13) / 2]),
        ([3, 2], 2, [(1 + 2 + 11 + 12) / 4, 3.0]),
        ([2, 5], 2, [(1 + 2 + 11 + 12) / 4, (13 + 14) / 2, 15.0]),
        ([1, 1], 4, [(1 + 11) / 2]),
        ([2, 2], 2, [(1 + 2 + 11 + 12) / 4]),
    ],
)
def test_uneven_data(ranks: Ranks, counts: list[int], k: int, means: list[float]) -> None:
    """Nobody hangs, no term is lost: each mean is over the terms of its window."""
    wanted, weight = [], 0.0
    for mean in means:
        weight -= mean
        wanted.append(weight)
    for found in ranks(ends.uneven, counts, k):
        assert found["updates"] == wanted
        assert found["steps"] == len(means)
        assert found["pending"] == 0


def test_uneven_data_of_a_weight_without_a_module(ranks: Ranks) -> None:
    """Windows of (1, 2 | 10, 20), of (3, 4 | 30), and of (5 | nothing)."""
    wanted = -(torch.tensor(33.0) / 4) - torch.tensor(37.0) / 3 - 5.0
    for found in ranks(ends.weight_alone):
        torch.testing.assert_close(found["weight"], wanted)
        assert found["steps"] == 3
        assert found["pending"] == 0


def test_skipped_slots_do_not_count(ranks: Ranks) -> None:
    first = (1 + 2 + 12) / 3
    second = (1 + 2 + 11) / 3
    for found in ranks(ends.skipping):
        assert found["weights"] == pytest.approx([-first, -first - second], rel=1e-6)
        assert found["synced"] == [False, True, False, True]
        assert found["calls"] == 4


def test_two_epochs_with_a_flush(ranks: Ranks) -> None:
    assert ranks(ends.two_epochs, 2) == [[(3, 0), (6, 0)]] * 2
