"""`request_stop`: one rank is asked, all of them see it at the same call, where a window has ended."""

from __future__ import annotations

import pytest
import torch

from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import regression
from tests.scenarios import stopped
from tests.workers import Ranks


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_all_ranks_stop_at_one_call(ranks: Ranks, at: int, backend: str) -> None:
    """Also where it is asked in the call that ends a window, before the ranks meet."""
    first, second = ranks(stopped.asked, at, (9, 9), "plain", backend)
    for found in (first, second):
        assert found["stopped_at"] == (3 if at <= 3 else 6)
        assert found["seen"] == [False] * (found["stopped_at"] - 1) + [True]
        assert (found["update"], found["pending"]) == (found["stopped_at"] // stopped.K, 0)
    assert all(map(torch.equal, first["values"], second["values"]))


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize("kind", ["manual", "each"])
def test_windows_of_other_kinds(ranks: Ranks, kind: str) -> None:
    """With a reduction in every call the ranks talk in every call; they stop at the end of a window all the same."""
    first, second = ranks(stopped.asked, 2, (9, 9), kind, "aot_eager")
    assert first["stopped_at"] == second["stopped_at"] == 3
    assert first["pending"] == second["pending"] == 0


@pytest.mark.gloo
@pytest.mark.captured
def test_a_rank_that_waits_in_flush_returns(ranks: Ranks) -> None:
    """Its data has ended; the other one's has not, when it is asked to stop."""
    first, second = ranks(stopped.asked, 5, (1, 15), "plain", "aot_eager")
    assert first["stopped_at"] is None
    assert first["requested"]
    assert second["stopped_at"] == 6
    assert first["update"] == second["update"] == 2
    assert all(map(torch.equal, first["values"], second["values"]))


@pytest.mark.captured
def test_one_rank() -> None:
    step, model = quick(plain_step, 2), mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    seen = []
    step.request_stop()  # before the first call, too
    for batch in regression(1, 2)[0]:
        assert not step.stop_requested
        step(model, optimizer, *batch)
        seen.append(step.stop_requested)
    assert seen == [False, True]
