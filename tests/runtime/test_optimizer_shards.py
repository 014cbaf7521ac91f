"""Pieces of a state while torch's checkpoint writes them: in the background, and when a rank is killed meanwhile."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.scenarios import saving_pieces
from tests.workers import Ranks, RanksFailed


pytestmark = [pytest.mark.gloo, pytest.mark.captured]


@pytest.mark.parametrize("name", ["AdamW", "Adafactor", "Muon"])
def test_training_goes_on_while_pieces_are_written(ranks: Ranks, tmp_path: Path, name: str) -> None:
    for found in ranks(saving_pieces.beside_training, name, str(tmp_path / "saved")):
        assert found == {"loaded": True, "trained on": True}


@pytest.mark.parametrize("when", ["before", "while writing"])
def test_a_rank_that_is_killed_while_it_saves(tmp_path: Path, when: str) -> None:
    """The other one raises in time; the earlier checkpoint is what it was, and the half one is none."""
    doomed = Ranks(tmp_path)
    with pytest.raises(RanksFailed):
        doomed(saving_pieces.killed, str(tmp_path), when)
    found = torch.load(tmp_path / "rank0.pt", weights_only=False)
    assert ("rank 1" in found["save"]) is (when == "before")
    assert found["save"] != "nothing"
    assert found["next"]["type"] == "RankLostError"
    assert "rank 1" in found["next"]["text"]
    assert found["seconds"] < 20
    (tmp_path / "again").mkdir()
    fresh = Ranks(tmp_path / "again")
    try:
        for one in fresh(saving_pieces.resumed, str(tmp_path)):
            assert one["same"]
            assert one["half"] == "CheckpointException"
            assert one["unchanged"]
    finally:
        fresh.stop()
