"""Opaque updates on two ranks: those of one process with all the data, and bitwise equal on both."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios import opaque
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def check(both: list[dict[str, Any]]) -> None:
    for found in both:
        torch.testing.assert_close(found["ours"], found["theirs"], atol=1e-5, rtol=1e-5)
    for mine, other in zip(both[0]["ours"], both[1]["ours"], strict=True):
        assert torch.equal(mine, other)


@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize("name", ["counts", "lookahead", "hook", "model"])
def test_windows_and_their_end(ranks: Ranks, name: str, wrap: str) -> None:
    both = ranks(opaque.windows, name, "aot_eager", wrap)
    want = opaque.reference(name)
    for found in both:
        torch.testing.assert_close(found["parameters"], want, atol=1e-6, rtol=0)
        assert found["updates"] == 3
    for mine, other in zip(both[0]["parameters"], both[1]["parameters"], strict=True):
        assert torch.equal(mine, other)


def test_the_default_backend(ranks: Ranks) -> None:
    both = ranks(opaque.windows, "counts", "inductor", "ddp")
    for found in both:
        torch.testing.assert_close(
            found["parameters"], opaque.reference("counts"), atol=1e-6, rtol=0
        )


@pytest.mark.parametrize(("k", "backend"), [(1, "aot_eager"), (2, "aot_eager"), (2, "inductor")])
def test_a_gan_whose_first_update_is_opaque(ranks: Ranks, k: int, backend: str) -> None:
    check(ranks(opaque.gan, k, backend))


@pytest.mark.parametrize("k", [1, 2])
def test_torchs_sharded_optimizer(ranks: Ranks, k: int) -> None:
    check(
        ranks(
            opaque.zero_redundancy,
            k,
        )
    )
