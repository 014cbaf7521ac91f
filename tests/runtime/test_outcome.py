"""Windows that close before it is known whether they counted, as on a device: the CPU is taken for one here."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios.behind import ALONE, asked_alone, behind, eager_updates
from tests.truth import Rules, Script, Slot, same
from tests.workers import Ranks


pytestmark = pytest.mark.captured

# Windows of two slots: the first counts, the next two do not, one does in part, the last does.
BAD = [False, False, True, True, True, True, False, True, False, False]
SCRIPT: Script = [Slot(n, rows=2 + n % 3, bad=bad) for n, bad in enumerate(BAD, 1)]
OTHER: Script = [Slot(20 + n, rows=2 + n % 4, bad=bad) for n, bad in enumerate(BAD, 1)]


def check(found: dict[str, Any], masked: int) -> None:
    same(found["ours"], found["truth"][-len(found["ours"]) :], 1e-6)
    assert found["steps"] == len(found["truth"]) == 3
    ours, truth = found["counts"]
    assert ours == truth
    assert sum("no update" in text for text in found["warnings"]) == 2
    assert found["masked"] == masked


@pytest.mark.parametrize("asked", [True, False])
@pytest.mark.parametrize(
    ("reduction", "step"), [("mean", "plain"), ("sum", "clipped"), ("weighted", "weighed")]
)
def test_a_window_of_which_nothing_counted(reduction: str, step: str, asked: bool) -> None:
    """The update, its state and its count of steps are as if the window had not been."""
    more = {"step": step, "optimizer": "adamw", "asked": asked}
    found = behind(0, [SCRIPT], Rules(2, reduction, skip_nonfinite=True), more)  # type: ignore[arg-type]
    check(found, masked=5)
    for output in found["outputs"] if step == "clipped" else ():
        assert len(output) == 2


def test_a_norm_of_no_update_is_nan() -> None:
    found = behind(0, [SCRIPT], Rules(2, skip_nonfinite=True), {"step": "clipped"})
    norms = [bool(norm.isnan()) for _, norm in found["outputs"][1::2]]
    assert norms == [False, True, True, False, False]


@pytest.mark.inductor
@pytest.mark.gloo
def test_two_ranks_mask_alike(ranks: Ranks) -> None:
    more = {
        "step": "weighed",
        "optimizer": "adamw",
        "asked": False,
        "options": {"backend": "inductor"},
    }
    both = ranks(behind, [SCRIPT, OTHER], Rules(2, "weighted", skip_nonfinite=True), more)
    for found in both:
        check(found, masked=5)
    assert all(torch.equal(t, both[1]["ours"][0][n]) for n, t in both[0]["ours"][0].items())


@pytest.mark.gloo
def test_a_rank_whose_terms_do_not_count_has_an_update_all_the_same(ranks: Ranks) -> None:
    fine: Script = [Slot(s.seed, s.rows) for s in OTHER if s is not None]
    for found in ranks(behind, [SCRIPT, fine], Rules(2, skip_nonfinite=True), {"asked": False}):
        same(found["ours"], found["truth"][-1:], 1e-6)
        assert found["steps"] == 5
        assert found["masked"] == 5
        assert found["warnings"] == []


@pytest.mark.gloo
def test_branches_that_differ_are_asked_for(ranks: Ranks) -> None:
    """Some gradients have terms of one micro-step alone: then the others may count without them."""
    mixed: Script = [Slot(n, branch="ab"[n % 2], bad=n == 4) for n in range(1, 9)]
    for found in ranks(
        behind, [mixed, mixed], Rules(2, skip_nonfinite=True), {"optimizer": "adamw"}
    ):
        same(found["ours"], found["truth"], 1e-6)
        assert found["counts"][0] == found["counts"][1]
        assert found["masked"] == 0


@pytest.mark.gloo
@pytest.mark.parametrize("how", ALONE)
def test_what_one_rank_asks_alone_waits_for_no_other(ranks: Ranks, how: str) -> None:
    """The comparison of parameters after the first update waits for the next meeting."""
    one, other = ranks(asked_alone, how, False)
    assert all(map(torch.equal, one["ours"], other["ours"]))
    updates = 1 if how == "let go" else 2
    for ours, plain in zip(one["ours"], eager_updates(updates), strict=True):
        torch.testing.assert_close(ours, plain)
    assert torch.equal(one["other"], other["other"])
    assert one["error"] == other["error"] == ""


@pytest.mark.gloo
def test_a_drift_is_found_at_the_meeting_after_it(ranks: Ranks) -> None:
    for found in ranks(asked_alone, "sync_gradients", True):
        assert "parameter 'weight' after update 1" in found["error"]
