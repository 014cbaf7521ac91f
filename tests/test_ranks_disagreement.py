"""Ranks that do not do the same: the same error on both, soon, instead of a hang or of copies that drift apart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios import disagreement
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def check_both(errors: list[dict[str, Any]], kind: str, *words: str) -> None:
    """The same type of error on every rank, soon, with these words, and with a way out."""
    for error in errors:
        assert error["type"] == kind, error
        assert all(word in error["text"] for word in words), error["text"]
        assert error["fix"]
        assert error["seconds"] < 30


def test_ranks_that_disagree_on_k(ranks: Ranks) -> None:
    """Both learn of it in the first call that closes their own window, before the update."""
    errors = ranks(disagreement.other_k)
    words = "rank 1 is at micro-step 3/3 while rank 0 is at micro-step 2/2"
    check_both(errors, "RanksDisagreeError", words)
    assert [error["calls"] for error in errors] == [2, 3]
    assert not any(error["moved"] for error in errors)


def test_a_rank_that_discards_alone(ranks: Ranks) -> None:
    errors = ranks(disagreement.discarded_alone)
    # Rank 0 closes its window with call 3, rank 1 never does with its four calls.
    check_both(errors, "RanksDisagreeError", "rank 1")


@pytest.mark.parametrize(("which", "named"), [("third", "'2.weight'"), ("all", "'0.weight'")])
def test_copies_that_start_differently(ranks: Ranks, which: str, named: str) -> None:
    errors = ranks(disagreement.other_start, which)
    check_both(errors, "ReplicaMismatchError", named, "rank 1", "seed all ranks")


def test_flush_before_anything_was_captured(ranks: Ranks) -> None:
    check_both(ranks(disagreement.flush_before_capture), "WindowError", "flush", "prepare")


def test_a_communication_hook_is_refused_by_name(ranks: Ranks) -> None:
    check_both(ranks(disagreement.comm_hook), "CaptureError", "hook", "reduce_dtype")


def test_a_rank_that_comes_too_late(ranks: Ranks) -> None:
    """The one that waited raises after rank_timeout, the late one when it comes; neither makes the update."""
    waited, late = ranks(disagreement.comes_late)
    check_both([waited, late], "RankLostError", "rank 0 is at micro-step 2/2 of update 2")
    assert "1.5 s" in waited["text"]
    assert "rank 1 is at micro-step 2/2 of update 2" in late["text"]
    assert waited["seconds"] < 60  # it did not wait for the group's own timeout
    assert waited["updates"] == late["updates"] == 1


def test_a_rank_that_compiles_is_waited_for(ranks: Ranks) -> None:
    for found in ranks(disagreement.compiles_long, 2.0, 1800.0):
        assert found["type"] == "nothing", found["text"]
        assert found["updates"] == 2


@pytest.mark.captured
def test_a_rank_that_hangs_while_it_compiles_is_not_waited_for_without_end(ranks: Ranks) -> None:
    found = ranks(disagreement.compiles_long, 6.0, 0.5)
    check_both(found, "RankLostError", "rank 0 is at micro-step")
    assert "ranks [1] have been compiling for over 0.5 s" in found[0]["text"]
    assert all(f["updates"] == 0 for f in found)
