"""As few all-reduces as there are buckets, once a window, by a count of what gloo really ran."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optimizers import adamw, sgd
from tests.scenarios import collectives
from tests.scenarios.common import Make
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def check_one_for_each_window(both: list[dict[str, Any]], k: int) -> None:
    """One bucket, and its all-reduce in the last micro-step of every window, the first included."""
    for found in both:
        assert found["buckets"] == 1
        assert found["first"] == 1
        assert [n for n, _, _ in found["each"]] == ([0] * (k - 1) + [1]) * 2
        assert found["before"] == k
        assert found["after"] == 1
        assert found["ranks"] == 2


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize(("k", "make"), [(1, sgd), (2, sgd), (3, sgd), (4, sgd), (3, adamw)])
def test_one_all_reduce_for_each_window(ranks: Ranks, wrap: str, k: int, make: Make) -> None:
    check_one_for_each_window(ranks(collectives.count, wrap, k, make), k)


@pytest.mark.inductor
@pytest.mark.parametrize(("wrap", "make"), [("plain", sgd), ("ddp", adamw)])
def test_one_all_reduce_with_inductor(ranks: Ranks, wrap: str, make: Make) -> None:
    options = {"backend": "inductor"}
    check_one_for_each_window(ranks(collectives.count, wrap, 2, make, None, options), 2)


def test_an_accumulate_call_does_not_speak_to_the_other_rank(ranks: Ranks) -> None:
    for found in ranks(collectives.count, "plain", 3):
        assert found["each"][0] == found["each"][1] == (0, 0, 0)


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
def test_small_buckets(ranks: Ranks, wrap: str) -> None:
    """A cap of a few bytes: one all-reduce for each of the four parameters."""
    for found in ranks(collectives.count, wrap, 2, sgd, 1e-6):
        assert found["buckets"] == 4
        assert found["first"] == 4
        assert [n for n, _, _ in found["each"]] == [0, 4, 0, 4]


def test_buckets_of_several_parameters(ranks: Ranks) -> None:
    """Each parameter is in one bucket; our cap counts under DDP too, and its static graph is not needed."""
    both = ranks(collectives.buckets, 0.0001)
    for found in both:
        assert found["last"] == found["after"] == len(found["buckets"]) > 1
        assert sorted(n for names in found["buckets"] for n in names) == sorted(found["names"])
        assert any("static_graph" in text for text in found["warnings"])
    pairs = zip(both[0]["weights"], both[1]["weights"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_sync_each_batch(ranks: Ranks) -> None:
    for found in ranks(collectives.count, "plain", 3, sgd, None, {"sync_each_batch": True}):
        assert [n for n, _, _ in found["each"]] == [1] * 6
        assert found["after"] == 3


def test_the_count_sees_what_ddp_does(ranks: Ranks) -> None:
    """The counter itself: eager DDP reduces in every micro-step, and under `no_sync` only in the last."""
    for found in ranks(collectives.count_eager, 3):
        assert found == [1, 1, 1, 0, 0, 1]
