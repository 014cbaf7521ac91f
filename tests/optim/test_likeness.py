"""Optimizers that are not alike on all ranks: an error by name on each, before anything changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gradsync_fx.optim.likeness import likeness
from tests.models import mlp
from tests.scenarios import unlike
from tests.workers import Ranks


def check(found: list[dict[str, Any]], word: str) -> None:
    for one in found:
        assert one["type"] == "RanksDisagreeError", one
        assert word in one["text"], one["text"]
        assert "rank 0 has" in one["text"]
        assert "rank 1 has" in one["text"]
        assert one["fix"]
        assert one["seconds"] < 30
        assert one["same"]


@pytest.mark.gloo
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("name", unlike.PAIRS)
def test_from_the_start(ranks: Ranks, name: str, shard: bool) -> None:
    found = ranks(unlike.from_the_start, name, shard)
    check(found, unlike.PAIRS[name][2])
    assert [one["calls"] for one in found] == [0, 0]


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize("name", unlike.DIVIDED)
def test_from_the_start_where_updates_are_divided(ranks: Ranks, name: str) -> None:
    check(ranks(unlike.from_the_start, name, True), unlike.DIVIDED[name][2])


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize("how", ["calls", "skips"])
@pytest.mark.parametrize("name", unlike.CHANGES)
def test_from_some_window_on(ranks: Ranks, name: str, how: str) -> None:
    found = ranks(unlike.later, name, how)
    check(found, unlike.CHANGES[name][1])
    assert [one["updates"] for one in found] == [2, 2]


@pytest.mark.gloo
@pytest.mark.captured
def test_an_option_on_one_rank_only(ranks: Ranks) -> None:
    check(ranks(unlike.other_option), "shard_optimizer")


@pytest.mark.gloo
@pytest.mark.captured
def test_made_alike_after_the_error(ranks: Ranks) -> None:
    first, second = ranks(unlike.way_out)
    assert all(map(torch.equal, first, second))


def test_the_same_is_told_of_the_same() -> None:
    models = mlp(), mlp()
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    first, second = (
        likeness(o, {id(p): n for n, p in m.named_parameters()})
        for o, m in zip(optimizers, models, strict=True)
    )
    assert first == second
    assert "AdamW with lr=0.001 in group 0" in first
