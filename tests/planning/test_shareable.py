"""Which buckets the ranks of one machine may share: none of nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios import empty
from tests.workers import Ranks


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 1e-6}, {"without": ("shared_memory",)}, {"without": ("in_place",)}],
    ids=lambda options: ", ".join(map(str, options.values())) or "default",
)
def test_parameters_without_elements(ranks: Ranks, options: dict[str, Any]) -> None:
    ours = ranks(empty.windows, options)
    for one, two, plain in zip(*ours, empty.plain(), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, plain, atol=2e-5, rtol=0)
