"""All-reduces that stand in the step itself: those of gradients are deferred, those of other values are not."""

from __future__ import annotations

import pytest
import torch

from tests.reference import assert_bitwise, assert_same, assert_same_tensors
from tests.scenarios import by_hand
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("how", "most"),
    [
        ("each", 1), ("functional", 1), ("flat", 1),
        ("average", 4), ("divided_before", 4), ("own_division", 4),
    ],
)  # fmt: skip
def test_reductions_by_hand_are_deferred(ranks: Ranks, how: str, most: int) -> None:
    """The user's own reduction and division run once a window, and nothing is averaged a second time.

    most: all-reduces that a window may take; there are four parameters.
    """
    k = 3
    both = ranks(by_hand.gradients, how, k)
    assert_bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=2e-6)
        if how != "own_division":
            assert_same_tensors(found["ours"], found["joined"], atol=1e-6)
        assert 1 <= found["first"] <= most
        assert found["each"][: k - 1] == [0] * (k - 1)
        assert 1 <= found["each"][-1] <= most


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
def test_a_metric_is_no_gradient(ranks: Ranks, wrap: str) -> None:
    both = ranks(by_hand.metric, wrap, 3)
    for i in range(3):
        assert torch.equal(both[0]["shown"][i], both[1]["shown"][i])
        mean = (both[0]["losses"][i] + both[1]["losses"][i]) / 2
        for found in both:
            torch.testing.assert_close(found["shown"][i], mean)
    for found in both:
        assert found["each"] == [1, 1, 2]
        assert len(found["kept"]) == 1
        assert "by_hand.py:" in found["kept"][0]
