"""Each optimization can be left out, and the numbers stay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gradsync_fx
from gradsync_fx.options import OPTIMIZATIONS, Options
from tests.refusals import refused
from tests.scenarios import compiled
from tests.scenarios.groups import joined
from tests.workers import Ranks


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize("without", [(optimization,) for optimization in OPTIMIZATIONS])
def test_the_same_numbers_without(without: tuple[str, ...], ranks: Ranks, tmp_path: Path) -> None:
    one, two = ranks(compiled.from_a_cold_cache, str(tmp_path), {"without": without})
    for ours, others, theirs in zip(
        one["parameters"], two["parameters"], joined(0, 1), strict=True
    ):
        assert torch.equal(ours, others)
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_unknown_optimizations() -> None:
    for wrong in ("overlap", ("fast",)):
        refused(gradsync_fx.OptionError, "argument 'without'", lambda w=wrong: Options(without=w))
