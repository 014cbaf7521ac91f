"""An open window that goes on with another number of ranks, and a data loader that goes on beside it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios import resharded
from tests.workers import Ranks


pytestmark = [pytest.mark.gloo, pytest.mark.captured]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    found = Ranks(tmp_path_factory.mktemp("four"), 4)
    yield found
    found.stop()


@pytest.mark.parametrize("how", ["planner", "files"])
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
@pytest.mark.parametrize("fewer", [True, False])
def test_the_window_is_that_of_all_terms(
    ranks: Ranks, four: Ranks, tmp_path: Path, how: str, reduction: str, fewer: bool
) -> None:
    """Half of it summed by four ranks and half by two, or the other way round."""
    options = {"reduction": reduction}
    old, new = (four, ranks) if fewer else (ranks, four)
    sizes = (4, 2) if fewer else (2, 4)
    old(resharded.saved, str(tmp_path), options)
    found = new(resharded.resumed, str(tmp_path), how, options)
    wanted = resharded.by_hand(*sizes, reduction == "weighted")
    for one in found:
        assert (one["at"], one["updates"]) == ((6, 2), 3)
        assert all(map(torch.equal, one["values"], found[0]["values"]))
        torch.testing.assert_close(one["values"], wanted, atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize(
    ("how", "options", "said"),
    [
        ("own file", {}, "WindowLoadPlanner"),
        ("files", {"reduction": "sum"}, "averages over the ranks"),
        ("planner", {"sync_each_batch": True}, "each rank holds the sum of all"),
    ],
)
def test_what_cannot_be_put_together_is_refused(
    ranks: Ranks, four: Ranks, tmp_path: Path, how: str, options: dict[str, Any], said: str
) -> None:
    four(resharded.saved, str(tmp_path), options)
    for found in ranks(resharded.resumed, str(tmp_path), how, options):
        assert said in found["error"]
        assert "4" in found["error"]
        assert "2" in found["error"]


@pytest.mark.parametrize("how", ["planner", "dcp", "files"])
def test_as_many_ranks_load_it_in_each_way(ranks: Ranks, tmp_path: Path, how: str) -> None:
    ranks(resharded.saved, str(tmp_path), {})
    wanted = resharded.by_hand(2, 2, False)
    for found in ranks(resharded.resumed, str(tmp_path), how, {}):
        torch.testing.assert_close(found["values"], wanted, atol=2e-6, rtol=2e-5)


def test_files_of_two_saves_are_refused(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(resharded.mixed, str(tmp_path)):
        assert "optimizer_step is 2, and 1 in" in found


def test_a_loader_beside_it(ranks: Ranks, tmp_path: Path) -> None:
    for found in ranks(resharded.loaded_again, str(tmp_path), 0):
        assert found["same"]
        assert found["losses"][0] == found["losses"][1]


def test_a_step_that_goes_on_while_it_is_saved(ranks: Ranks, tmp_path: Path) -> None:
    """What is saved is the window of the call of `async_save`, not what is there when it is written."""
    for found in ranks(resharded.loaded_again, str(tmp_path), 0, True):
        assert found["same"]
        assert found["losses"][0] == found["losses"][1]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_loader_with_workers(tmp_path: Path) -> None:
    """Batches that they have fetched already are not lost."""
    found = resharded.loaded_again(0, str(tmp_path), 2)
    assert found["same"]
    assert found["losses"][0] == found["losses"][1]
