"""Two ranks over gloo: equal copies, equal to eager DDP and to the joined batch, and as few collectives as buckets."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests import scenarios
from tests.reference import Run, assert_same, assert_same_tensors
from tests.workers import Ranks, RanksFailed


pytestmark = pytest.mark.gloo


def bitwise(first: Run, second: Run) -> None:
    """Equal after every update, to the last bit."""
    assert len(first.updates) == len(second.updates) > 0
    for i, (mine, other) in enumerate(zip(first.updates, second.updates, strict=True)):
        for name, tensor in mine.items():
            assert torch.equal(tensor, other[name]), f"{name} after update {i}"


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_lin_is_exact(ranks: Ranks, wrap: str, k: int) -> None:
    """(1/R) sum_r (1/k) sum_i x[r, i]: integers, so exact."""
    first, second = ranks(scenarios.lin, wrap, k, 5)
    weight = torch.zeros(())
    for n, found in enumerate(first):
        total = sum(1 + 3 * n + i + 10 * r for r in range(2) for i in range(k))
        weight = weight - torch.tensor(float(total)) / (2 * k)
        assert found == weight.item()
    assert first == second


def test_boundary_is_not_one_off(ranks: Ranks) -> None:
    assert ranks(scenarios.off_by_one) == [5.5, 5.5]


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_sgd_equals_ddp_and_the_joined_batch(ranks: Ranks, wrap: str, k: int) -> None:
    both = ranks(scenarios.against_references, wrap, k, "sgd", 5, {})
    bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-6)
        assert_same_tensors(found["ours"], found["joined"], atol=1e-6)
        assert found["compiled"] == min(k, 2)


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_adamw_after_20_updates(ranks: Ranks, wrap: str, k: int) -> None:
    both = ranks(scenarios.against_references, wrap, k, "adamw", 20, {})
    bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-5)
        assert_same_tensors(found["ours"], found["joined"], atol=1e-5)


@pytest.mark.parametrize("flag", ["static_graph", "find_unused_parameters"])
def test_settings_of_ddp_that_are_not_needed(ranks: Ranks, flag: str) -> None:
    """No warm-up, no assertion of the reducer's: the report says that the flag is not used."""
    both = ranks(scenarios.against_references, "ddp", 2, "sgd", 3, {flag: True})
    bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-6)
        assert flag in found["report"]


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("k", [1, 4])
def test_one_all_reduce_for_each_window(ranks: Ranks, wrap: str, k: int) -> None:
    for found in ranks(scenarios.count, wrap, k, None, {}):
        assert found["buckets"] == 1
        assert found["first"] == 1
        assert [n for n, _, _ in found["each"]] == ([0] * (k - 1) + [1]) * 2
        assert found["before"] == k
        assert found["after"] == 1


def test_an_accumulate_call_does_not_speak_to_the_other_rank(ranks: Ranks) -> None:
    for found in ranks(scenarios.count, "plain", 3, None, {}):
        assert found["each"][0] == found["each"][1] == (0, 0, 0)


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
def test_small_buckets(ranks: Ranks, wrap: str) -> None:
    """A cap of a few bytes: one all-reduce for each of the four parameters."""
    for found in ranks(scenarios.count, wrap, 2, 1e-5, {}):
        assert found["buckets"] == 4
        assert found["first"] == 4
        assert [n for n, _, _ in found["each"]] == [0, 4, 0, 4]


def test_sync_each_batch(ranks: Ranks) -> None:
    for found in ranks(scenarios.count, "plain", 3, None, {"sync_each_batch": True}):
        assert [n for n, _, _ in found["each"]] == [1] * 6
        assert found["after"] == 3


def test_the_count_sees_what_ddp_does(ranks: Ranks) -> None:
    """The counter itself: eager DDP reduces in every micro-step, and under `no_sync` only in the last."""
    for found in ranks(scenarios.count_eager, 3):
        assert found == [1, 1, 1, 0, 0, 1]


@pytest.mark.parametrize("setting", ["default", "off"])
@pytest.mark.parametrize("wrap", ["plain", "ddp"])
def test_batch_statistics(ranks: Ranks, wrap: str, setting: str) -> None:
    """Buffers as eager DDP has them: rank 0's at the start of a window, or each rank's own."""
    if wrap == "plain" and setting == "off":
        pytest.skip("a plain module has no such setting")
    both = ranks(scenarios.buffers, wrap, setting, 3)
    for found in both:
        assert_same(found["ours"], found["eager"], atol=2e-6)
    parameters = [n for n in both[0]["ours"].updates[0] if not n.startswith("norm.running")]
    for mine, other in zip(both[0]["ours"].updates, both[1]["ours"].updates, strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in parameters)


@pytest.mark.parametrize(
    ("how", "wanted"),
    [
        ("each", 4), ("average", 4), ("functional", 4), ("divided_before", 4), ("flat", 1),
        ("own_division", 4),
    ],
)  # fmt: skip
def test_reductions_by_hand_are_deferred(ranks: Ranks, how: str, wanted: int) -> None:
    """The user's own reduction and division run once a window, and nothing is averaged a second time."""
    k = 3
    both = ranks(scenarios.by_hand, how, k)
    bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=2e-6)
        assert found["each"][: k - 1] == [0] * (k - 1)
        assert 1 <= found["each"][-1] <= wanted


def test_a_metric_is_no_gradient(ranks: Ranks) -> None:
    both = ranks(scenarios.metric, 3)
    for i in range(3):
        mean = (both[0]["losses"][i] + both[1]["losses"][i]) / 2
        for found in both:
            torch.testing.assert_close(found["shown"][i], mean)
    for found in both:
        assert found["each"] == [1, 1, 2]
        assert len(found["kept"]) == 1
        assert "scenarios.py:" in found["kept"][0]


def test_a_bypassed_wrapper_reduces_all_the_same(ranks: Ranks) -> None:
    for mine, whole in ranks(scenarios.inner_module):
        assert_same_tensors(mine, whole, atol=1e-6)


def test_nested_wrappers(ranks: Ranks) -> None:
    for found in ranks(scenarios.nested):
        for mine, whole in zip(found["ours"], found["whole"], strict=True):
            torch.testing.assert_close(mine, whole, atol=1e-6, rtol=0)
        assert found["each"] == [0, 1, 0, 1]


def test_a_group_of_one_reduces_nothing(ranks: Ranks) -> None:
    assert ranks(scenarios.subgroup) == [[-1.5], [-11.5]]


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
    for found in ranks(scenarios.uneven, counts, k):
        assert found["updates"] == wanted
        assert found["steps"] == len(means)
        assert found["pending"] == 0


def test_skipped_slots_do_not_count(ranks: Ranks) -> None:
    first = (1 + 2 + 12) / 3
    second = (1 + 2 + 11) / 3
    for found in ranks(scenarios.skipping):
        assert found["weights"] == pytest.approx([-first, -first - second], rel=1e-6)
        assert found["synced"] == [False, True, False, True]
        assert found["calls"] == 4


def test_two_epochs_with_a_flush(ranks: Ranks) -> None:
    assert ranks(scenarios.two_epochs, 2) == [[(3, 0), (6, 0)]] * 2


def check_both(errors: list[dict[str, Any]], kind: str, *words: str) -> None:
    """The same type of error on every rank, soon, with these words, and with a way out."""
    for error in errors:
        assert error["type"] == kind, error
        assert all(word in error["text"] for word in words), error["text"]
        assert error["fix"]
        assert error["seconds"] < 30


def test_ranks_that_disagree_on_k(ranks: Ranks) -> None:
    check_both(ranks(scenarios.other_k), "RanksDisagreeError", "rank 0", "2/2", "3/3")


def test_a_rank_that_discards_alone(ranks: Ranks) -> None:
    errors = ranks(scenarios.discarded_alone)
    # Rank 0 closes its window with call 3, rank 1 never does with its four calls.
    check_both(errors, "RanksDisagreeError", "rank 1")


def test_copies_that_start_differently(ranks: Ranks) -> None:
    check_both(
        ranks(scenarios.other_start),
        "ReplicaMismatchError",
        "'2.weight'",
        "rank 1",
        "seed all ranks",
    )


def test_flush_before_anything_was_captured(ranks: Ranks) -> None:
    check_both(ranks(scenarios.flush_before_capture), "WindowError", "flush", "prepare")


def test_a_communication_hook_is_refused_by_name(ranks: Ranks) -> None:
    check_both(ranks(scenarios.comm_hook), "CaptureError", "hook", "reduce_dtype")


@pytest.mark.parametrize("stop", [1, 4])
def test_a_resumed_run_is_bitwise_the_run_that_was_not(ranks: Ranks, stop: int) -> None:
    for plain, interrupted in ranks(scenarios.resumed, stop):
        assert all(torch.equal(a, b) for a, b in zip(plain, interrupted, strict=True))


@pytest.mark.inductor
def test_inductor_on_two_ranks(ranks: Ranks) -> None:
    both = ranks(scenarios.by_inductor)
    bitwise(both[0]["ours"], both[1]["ours"])
    for found in both:
        assert_same(found["ours"], found["eager"], atol=1e-6)
        assert found["each"] == [0, 1]


def _raise_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("only here")
    return rank


def test_the_pair_survives_a_scenario_that_fails(ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1: .*only here"):
        ranks(_raise_on_one)
    assert ranks(scenarios.off_by_one) == [5.5, 5.5]
