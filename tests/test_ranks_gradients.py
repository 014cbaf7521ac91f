"""Clipping, norms, noise and flags on two ranks: once a window, on the reduced gradients, the same on all ranks."""

from __future__ import annotations

import math

import pytest
import torch

from tests.scenarios import gradients
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


# What changes gradients by its own code is refused where a step runs eagerly, and what reads them sees its own.
NEEDS_A_CAPTURE = {"value", "by_hand", "noise", "norm_over_ranks", "found_inf"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.captured] if name in NEEDS_A_CAPTURE else [])
        for name in gradients.USES
    ],
)
def test_once_for_each_window(ranks: Ranks, name: str) -> None:
    both = ranks(gradients.used, name)
    extra = name in ("norm_over_ranks", "found_inf")
    for found in both:
        torch.testing.assert_close(found["ours"], found["wanted"], atol=1e-6, rtol=0)
        accumulate = [v for i, v in enumerate(found["seen"]) if i % gradients.K != gradients.K - 1]
        assert all(math.isnan(v) for v in accumulate)
        boundary = found["seen"][gradients.K - 1 :: gradients.K]
        assert boundary == pytest.approx(found["told"], rel=1e-5)
        assert found["collectives"] == [0, 0, 1 + extra] * 3
    for mine, theirs in zip(both[0]["ours"], both[1]["ours"], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    if name == "found_inf":
        assert both[0]["told"] == [0.0, 1.0, 0.0]
