"""Parameters that differ between ranks after an update are found at the next comparison, and named."""

from __future__ import annotations

import pytest
import torch

from gradsync_fx.comm.drift import COMPARED_EVERY, fingerprint
from tests.scenarios import drifting
from tests.workers import Ranks


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "at", "found_at", "named"),
    [
        ("rate", 2, COMPARED_EVERY, "'0.weight'"),
        ("last parameter", 7, COMPARED_EVERY, "'2.bias'"),
    ],
)
def test_parameters_that_differ(how: str, at: int, found_at: int, named: str, ranks: Ranks) -> None:
    for seen in ranks(drifting.drifting, how, at, COMPARED_EVERY + 5):
        assert seen["updates"] == found_at
        assert named in seen["error"]
        assert "rank 1" in seen["error"]
        assert "self_check" in seen["error"]


@pytest.mark.gloo
def test_a_difference_of_rounding_warns_once(ranks: Ranks) -> None:
    for seen in ranks(drifting.drifting, "rounding", 7, 2 * COMPARED_EVERY + 1):
        assert seen["error"] == ""
        assert seen["updates"] == 2 * COMPARED_EVERY + 1
        assert sum("differ among the ranks" in text for text in seen["warnings"]) == 1


@pytest.mark.gloo
@pytest.mark.captured
def test_what_a_comparison_costs(ranks: Ranks) -> None:
    """One small gather, at the updates that compare."""
    for seen in ranks(drifting.drifting, "nothing", 1, COMPARED_EVERY + 1):
        gathers = seen["gathers"]
        usual = gathers[1]
        assert gathers[1 : COMPARED_EVERY - 1] == [usual] * (COMPARED_EVERY - 2)
        assert gathers[COMPARED_EVERY - 1] == usual + 1
        assert seen["warnings"] == []


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]
)
def test_the_smallest_change_of_any_element_shows(dtype: torch.dtype) -> None:
    plain = torch.zeros(3, 5, dtype=dtype)
    seen = {int(fingerprint([plain]))}
    for i in range(plain.numel()):
        other = plain.clone()
        bits = torch.view_as_real(other) if dtype.is_complex else other
        bits.view(-1).view(torch.uint8)[i * bits.itemsize] = 1
        seen.add(int(fingerprint([other])))
    assert len(seen) == 1 + plain.numel()


def test_a_change_of_order_shows() -> None:
    a, b = torch.arange(4.0), torch.arange(4.0) + 1
    assert fingerprint([a, b]) != fingerprint([b, a])
    assert fingerprint([a]) != fingerprint([a.flip(0)])
    assert fingerprint([a.view(2, 2).t()]) == fingerprint([a.view(2, 2).t().contiguous()])
    assert fingerprint([]) == 0
