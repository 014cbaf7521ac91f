"""What the optimizations make of a program for a GPU: each is seen in its code, and is gone where it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cross.cases import Case
from tests.cross.conftest import Lower
from tests.cross.results import Lowered


pytestmark = [pytest.mark.cross, pytest.mark.captured]
MLP = Case("mlp", tail=False)


def products(made: Lowered) -> list[tuple[str, ...]]:
    """What products are added to where they are made."""
    return [e.writes for e in made.of("extern") if "add_product" in e.name]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_products_go_into_their_sums(precision: str, lower: Lower) -> None:
    """Of all three layers; where the sums are wider than the products, too."""
    for name, made in lower(replace(MLP, precision=precision)).items():
        sums = [f"accumulator {layer}.weight" for layer in ("last", "middle.0", "first.0")]
        assert products(made) == [(total,) for total in sums], name


def test_products_by_themselves(lower: Lower) -> None:
    plain, without = lower(MLP), lower(replace(MLP, without=("products",)))
    for name, made in without.items():
        assert products(made) == []
        assert made.source.count("= empty_strided_cuda(") > plain[name].source.count(
            "= empty_strided_cuda("
        )
