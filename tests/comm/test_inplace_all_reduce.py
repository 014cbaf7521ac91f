"""Sums over the ranks, in place, whether or not they lie in one stretch."""

from __future__ import annotations

import pytest
import torch

from tests.scenarios import wires
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["flat", "apart"])
@pytest.mark.parametrize("known", [True, False])
def test_sums_over_the_ranks(ranks: Ranks, layout: str, wire: torch.dtype, known: bool) -> None:
    third = torch.tensor(1 / 3).to(wire)
    wanted = (third + torch.tensor(2 / 3).to(wire)).float()
    for sums in ranks(wires.reduced, layout, wire, known):
        for form, total in zip(wires.FORMS, sums, strict=True):
            assert total.shape == form.shape
            assert torch.equal(total, wanted.expand(form.shape))
