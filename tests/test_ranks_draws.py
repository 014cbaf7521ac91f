"""Steps that draw on the host, on two ranks that draw apart: each takes its own branches of the same step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios import drawing
from tests.workers import Ranks


pytestmark = [pytest.mark.gloo, pytest.mark.captured]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "skip_nonfinite": {"skip_nonfinite": True, "bucket_cap_mb": 1e-4},
}


def check(both: list[dict[str, Any]], within: float) -> None:
    for found in both:
        ours, eager = found["values"]
        for mine, other in zip(ours, eager, strict=True):
            torch.testing.assert_close(mine, other, atol=within, rtol=0)
        torch.testing.assert_close(*map(torch.tensor, found["losses"]), atol=within, rtol=1e-5)
        assert found["same states"]
        assert found["passed"], found["verdict"]
    assert all(map(torch.equal, *(found["values"][0] for found in both)))


@pytest.mark.inductor
@pytest.mark.parametrize("how", ["python", "own", "torch"])
def test_each_rank_goes_its_own_way(ranks: Ranks, how: str) -> None:
    check(ranks(drawing.drawn, how, {}), 1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_with_other_options(ranks: Ranks, options: dict[str, Any]) -> None:
    check(ranks(drawing.drawn, "python", {"backend": "aot_eager", **options}), 1e-6)
