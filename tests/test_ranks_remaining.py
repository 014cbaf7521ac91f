"""Collectives that are no gradient reduction: on every rank, in the same order, whoever uses the result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios import remaining
from tests.test_ranks_disagreement import check_both
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def check_as_eager(both: list[dict[str, Any]]) -> None:
    for found in both:
        for mine, other in zip(found["said"]["ours"], found["said"]["eager"], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found["ours"], found["eager"], atol=1e-6, rtol=1e-5)
    pairs = zip(both[0]["ours"], both[1]["ours"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("what", list(remaining.METRICS))
def test_a_result_that_one_rank_uses(ranks: Ranks, what: str, k: int) -> None:
    check_as_eager(ranks(remaining.both_ways, what, k))


@pytest.mark.parametrize("what", ["largest", "gathered"])
def test_without_ddp_and_with_a_reduction_in_each_call(ranks: Ranks, what: str) -> None:
    check_as_eager(ranks(remaining.both_ways, what, 2, "plain", {"sync_each_batch": True}))


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("what", "without"), [(w, ()) for w in remaining.METRICS] + [("largest", ("overlap",))]
)
def test_a_result_that_one_rank_uses_with_inductor(
    ranks: Ranks, what: str, without: tuple[str, ...]
) -> None:
    options = {"backend": "inductor", "bucket_cap_mb": 1e-6, "without": without}
    check_as_eager(ranks(remaining.both_ways, what, 2, "plain", options))


@pytest.mark.parametrize("how", ["sum", "max", "gather", "function", "copied"])
def test_an_activation_that_is_reduced_in_forward(ranks: Ranks, how: str) -> None:
    """In place, autograd does not see it; by torch's functional form it has a gradient. Both as in eager PyTorch."""
    check_as_eager(ranks(remaining.both_ways, f"reduced {how}", 2))


def test_an_activation_that_is_kept_for_the_backward_and_reduced(ranks: Ranks) -> None:
    check_both(ranks(remaining.saved), "CaptureError", "all_reduce at", "in place")


@pytest.mark.inductor
def test_an_activation_that_is_reduced_in_forward_with_inductor(ranks: Ranks) -> None:
    check_as_eager(ranks(remaining.both_ways, "reduced sum", 2, "ddp", {"backend": "inductor"}))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_a_metric_of_the_gradients(ranks: Ranks, k: int, backend: str) -> None:
    both = ranks(remaining.of_gradients, k, backend)
    for (mine, _), (total, norm) in zip(both[0]["values"], both[1]["values"], strict=True):
        torch.testing.assert_close(total, norm)
        assert torch.equal(mine, norm)
    for found in both:
        assert found["tail"].count("_c10d_functional.all_reduce.default") == 2
    pairs = zip(both[0]["weights"], both[1]["weights"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("how", ["only rank 0", "kind", "order", "dtype", "size"])
def test_collectives_that_differ(ranks: Ranks, how: str, k: int) -> None:
    errors = ranks(remaining.differing, how, k)
    check_both(
        errors, "RanksDisagreeError", "collective 1 of the step", "remaining.py:", "rank 1 has"
    )
    assert not any(error["moved"] for error in errors)


def test_groups_of_their_own(ranks: Ranks) -> None:
    both = ranks(remaining.own_groups, 2)
    pairs = zip(both[0]["weights"], both[1]["weights"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("end", ["flush", "skip"])
def test_a_rank_without_data_for_them(ranks: Ranks, end: str, k: int) -> None:
    errors = ranks(remaining.without_data, end, k)
    check_both(errors, "RanksDisagreeError", "all_reduce", "remaining.py:", "ranks [1] have none")


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("end", ["flush", "skip"])
def test_a_rank_without_data_for_those_of_an_eager_step(ranks: Ranks, end: str, k: int) -> None:
    errors = ranks(remaining.without_data, end, k, True)
    check_both(errors, "RanksDisagreeError", "a collective", "remaining.py:", "ranks [1] have none")
