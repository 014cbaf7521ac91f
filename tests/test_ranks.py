"""Two ranks over gloo: equal copies, equal to eager DDP and to the joined batch.

What each rank does stands in tests/scenarios, a file for each of the test_ranks*.py; a test here asks both for what
they found. The neighbours count collectives (test_ranks_collectives), reduce by hand (test_ranks_by_hand), run out of
data (test_ranks_ends) and disagree (test_ranks_disagreement).
"""

from __future__ import annotations

import pytest
import torch

from tests.eagerly import programs
from tests.optimizers import adamw, sgd
from tests.reference import assert_bitwise, assert_same, assert_same_tensors
from tests.scenarios import windows
from tests.scenarios.common import Make
from tests.workers import Ranks, RanksFailed


pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_lin_is_exact(ranks: Ranks, wrap: str, k: int) -> None:
    """(1/R) sum_r (1/k) sum_i x[r, i]: integers, so exact."""
    first, second = ranks(windows.lin, wrap, k, 5)
    weight = torch.zeros(())
    for n, found in enumerate(first):
        total = sum(1 + 3 * n + i + 10 * r for r in range(2) for i in range(k))
        weight = weight - torch.tensor(float(total)) / (2 * k)
        assert found == weight.item()
    assert first == second


def test_boundary_is_not_one_off(ranks: Ranks) -> None:
    assert ranks(windows.off_by_one) == [5.5, 5.5]


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_sgd_equals_ddp_and_the_joined_batch(ranks: Ranks, wrap: str, k: int) -> None:
    both = ranks(windows.against_references, wrap, k, sgd, 5, {})
    assert_bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-6)
        assert_same_tensors(found["ours"], found["joined"], atol=1e-6)
        assert found["compiled"] == programs(min(k, 2))


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_adamw_after_20_updates(ranks: Ranks, wrap: str, k: int) -> None:
    both = ranks(windows.against_references, wrap, k, adamw, 20, {})
    assert_bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-5)
        assert_same_tensors(found["ours"], found["joined"], atol=1e-5)
        assert found["compiled"] == programs(min(k, 2))


@pytest.mark.parametrize("flag", ["static_graph", "find_unused_parameters"])
def test_settings_of_ddp_that_are_not_needed(ranks: Ranks, flag: str) -> None:
    """No warm-up, no assertion of the reducer's: the report says that the flag is not used."""
    both = ranks(windows.against_references, "ddp", 2, sgd, 3, {flag: True})
    assert_bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-6)
        assert flag in found["report"]


@pytest.mark.parametrize(
    ("wrap", "setting"),
    [
        ("plain", "default"), ("plain", "never"),
        ("ddp", "default"), ("ddp", "off"), ("ddp", "window_start"), ("ddp", "never"),
        ("ddp", "every"), ("plain", "every"),
    ],
)  # fmt: skip
def test_batch_statistics(ranks: Ranks, wrap: str, setting: str) -> None:
    """Buffers as eager DDP has them: rank 0's at the start of a window, or each rank's own.

    "off" is DDP's own setting, "window_start", "never" and "every" are ours.
    """
    both = ranks(windows.buffers, wrap, setting, 3)
    for found in both:
        assert_same(found["ours"], found["eager"], atol=2e-6)
    parameters = [n for n in both[0]["ours"].updates[0] if not n.startswith("norm.running")]
    for mine, other in zip(both[0]["ours"].updates, both[1]["ours"].updates, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in parameters)


def test_buffers_at_every_call_and_data_that_ends_early(ranks: Ranks) -> None:
    first, second = ranks(windows.buffers_of_a_rank_that_ends_early)
    assert first["updates"] == second["updates"] == 3
    for name, tensor in first["state"].items():
        if "running" not in name and "batches" not in name:
            assert torch.equal(tensor, second["state"][name]), name


def test_a_bypassed_wrapper_reduces_all_the_same(ranks: Ranks) -> None:
    for mine, whole in ranks(windows.inner_module):
        assert_same_tensors(mine, whole, atol=1e-6)


def test_nested_wrappers(ranks: Ranks) -> None:
    for found in ranks(windows.nested):
        for mine, whole in zip(found["ours"], found["whole"], strict=True):
            torch.testing.assert_close(mine, whole, atol=1e-6, rtol=0)
        assert found["each"] == [0, 1, 0, 1]


def test_a_group_of_one_reduces_nothing(ranks: Ranks) -> None:
    assert ranks(windows.subgroup) == [[-1.5], [-11.5]]


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_is_bitwise_the_run_that_was_not(ranks: Ranks, stop: int) -> None:
    for plain, interrupted in ranks(windows.resumed, stop):
        assert all(torch.equal(a, b) for a, b in zip(plain, interrupted, strict=True))


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("wrap", "make", "updates", "atol"), [("plain", sgd, 3, 1e-6), ("ddp", adamw, 20, 1e-5)]
)
def test_inductor(ranks: Ranks, wrap: str, make: Make, updates: int, atol: float) -> None:
    options = {"backend": "inductor"}
    both = ranks(windows.against_references, wrap, 2, make, updates, {}, options)
    assert_bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=atol)
        assert_same_tensors(found["ours"], found["joined"], atol=atol)
        assert found["compiled"] == programs(2)


def _raise_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("only here")
    return rank


def test_the_pair_survives_a_scenario_that_fails(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: .*only here"):
        ranks(_raise_on_one)
    assert ranks(windows.off_by_one) == [5.5, 5.5]
