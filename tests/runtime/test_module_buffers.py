"""Module buffers where ranks have different amounts of data: those of a rank that still has some live on."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios import statistics
from tests.workers import Ranks


pytestmark = pytest.mark.gloo

MEAN, COUNT = "0.running_mean", "0.num_batches_tracked"


def check_alive(both: list[dict[str, Any]], calls: int) -> None:
    """Equal on both ranks, and of as many batches as the rank with most data has."""
    for name, value in both[0].items():
        assert torch.equal(value, both[1][name]), name
    assert int(both[0][COUNT]) == calls
    # Each batch has a mean of about 5, and moves a tenth of the way there.
    torch.testing.assert_close(
        both[0][MEAN], torch.full((4,), 5 * (1 - 0.9**calls)), atol=0.3, rtol=0
    )


@pytest.mark.parametrize("counts", [(2, 12), (12, 2), (3, 12), (12, 12), (1, 8)])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("mode", ["window_start", "every"])
def test_statistics_of_a_rank_that_has_data(
    ranks: Ranks, mode: str, k: int, counts: tuple[int, int]
) -> None:
    both = ranks(statistics.uneven, counts, k, "ddp", {"broadcast_buffers": mode}, False)
    check_alive(both, max(counts))


@pytest.mark.parametrize("mode", ["window_start", "every"])
def test_a_rank_that_skips_to_the_end(ranks: Ranks, mode: str) -> None:
    options = {"broadcast_buffers": mode}
    check_alive(ranks(statistics.uneven, (2, 12), 2, "plain", options, True), 12)


@pytest.mark.parametrize("mode", ["window_start", "every"])
def test_statistics_of_a_step_that_runs_eagerly(ranks: Ranks, mode: str) -> None:
    options = {"broadcast_buffers": mode, "on_unsupported": "eager"}
    check_alive(ranks(statistics.uneven, (2, 12), 2, "ddp", options, False), 12)


@pytest.mark.inductor
def test_statistics_with_inductor(ranks: Ranks) -> None:
    check_alive(ranks(statistics.uneven, (2, 12), 2, "ddp", {"backend": "inductor"}, False), 12)


def test_never_means_each_its_own(ranks: Ranks) -> None:
    options = {"broadcast_buffers": "never"}
    both = ranks(statistics.uneven, (2, 12), 1, "ddp", options, False)
    assert [int(found[COUNT]) for found in both] == [2, 12]


@pytest.mark.parametrize("counts", [(2, 12), (12, 2)])
def test_as_with_ddps_own_join(ranks: Ranks, counts: tuple[int, int]) -> None:
    ours = ranks(statistics.uneven, counts, 1, "ddp", {}, False)
    theirs = ranks(statistics.joined, counts)
    for mine, other in zip(ours, theirs, strict=True):
        assert int(mine[COUNT]) == int(other[COUNT])
        torch.testing.assert_close(mine[MEAN], other[MEAN], atol=0.3, rtol=0)


def test_the_next_epoch_goes_on_from_there(ranks: Ranks) -> None:
    both = ranks(statistics.two_epochs, 2)
    assert [[int(n) for n in found] for found in both] == [[7, 14]] * 2
