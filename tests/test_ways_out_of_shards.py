"""What errors about updates that are shared out say to do is done, and works."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios import sharded_ways_out
from tests.workers import Ranks


pytestmark = [pytest.mark.gloo, pytest.mark.captured]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("together", "ShareError"),
        ("opaque", "ShareError"),
        ("own states", "ShareError"),
        ("flat", "CaptureError"),
    ],
)
def test_what_does_not_go_together_is_left_out(ranks: Ranks, name: str, kind: str) -> None:
    for text, works in ranks(sharded_ways_out.left_out, name):
        assert text.startswith(kind)
        assert "leave" in text
        assert works


def test_another_kind_of_update_takes_a_new_optimizer(ranks: Ranks) -> None:
    for text, works in ranks(sharded_ways_out.another_kind):
        assert text.startswith("ShareError")
        assert works


def test_another_group_of_ranks_takes_a_new_optimizer(tmp_path: Path) -> None:
    four = Ranks(tmp_path, world=4)
    try:
        for text, works in four(sharded_ways_out.another_group):
            assert text.startswith("OptionError")
            assert "divided among 4 ranks" in text
            assert works
    finally:
        four.stop()


def test_a_state_is_loaded_on_every_rank(ranks: Ranks) -> None:
    for text, works in ranks(sharded_ways_out.unlike):
        assert text.startswith("RanksDisagreeError")
        assert works


def test_a_state_is_asked_for_by_every_rank(ranks: Ranks) -> None:
    for text, works in ranks(sharded_ways_out.apart):
        assert text.startswith("RanksDisagreeError")
        assert works


def test_pieces_are_of_an_optimizer_that_is_divided(ranks: Ranks) -> None:
    for texts, works in ranks(sharded_ways_out.pieces):
        assert all(text.startswith("StateError") for text in texts)
        assert works
