"""Module buffers over ranks where branches of a step reach different models that nobody trains."""

from __future__ import annotations

import pytest
import torch

from tests.scenarios import branching
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def test_all_branches_buffers_are_sent_whichever_closes_the_window(ranks: Ranks) -> None:
    """The window is closed by the branch of b: a's statistics are rank 0's on all ranks as well."""
    one, two = ranks(branching.read_only, ["abab", "abab"], False)
    for name, mean in branching.means_of("abab").items():
        torch.testing.assert_close(one[name], mean)
        assert torch.equal(one[name], two[name])


@pytest.mark.captured
def test_ranks_that_reached_different_branches_are_refused_and_prepare_is_a_way_out(
    ranks: Ranks,
) -> None:
    ways = ["aabb", "aaaa"]
    for found in ranks(branching.read_only_refused, ways):
        assert found["type"] == "RanksDisagreeError"
        assert found["culprit"] == "buffer 'norms.b.num_batches_tracked'"
        assert "ranks [1] have not reached it so far (3 buffers in all)" in found["text"]
        assert "step.prepare(...) once for each branch" in found["fix"]
    one, two = ranks(branching.read_only, ways, True)
    for name, mean in branching.means_of(ways[0]).items():
        torch.testing.assert_close(one[name], mean)
        assert torch.equal(one[name], two[name])
