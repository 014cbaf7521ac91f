"""What a report says of updates that are shared out."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

import gradsync_fx
from gradsync_fx.inspection.report import Report
from tests.drive import plain_step
from tests.scenarios import sharded
from tests.workers import Ranks


def explained(world: int, model: nn.Module, optimizer: Any, *data: Any, **options: Any) -> Report:
    return gradsync_fx.explain(
        plain_step, model, optimizer, *data, world_size=world, shard_optimizer=True, **options
    )


@pytest.mark.parametrize("world", [2, 4])
def test_even_pieces(world: int) -> None:
    """One matrix of 64 x 64: AdamW's moments in equal parts, and what an all-reduce would send."""
    model = nn.Linear(64, 64, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    found = explained(world, model, optimizer, torch.randn(4, 64), torch.randn(4, 64)).sharing
    assert found is not None
    size = 64 * 64 * 4
    assert found.whole_state_bytes - found.state_bytes == 2 * size * (world - 1) // world
    assert found.sums_bytes == found.parameters_bytes == size * (world - 1) // world
    assert (found.cut, found.owners, found.other_bytes) == (("weight",), {}, 0)


def test_owners_and_all_views() -> None:
    model = sharded.net(bias=False)
    optimizer = torch.optim.Muon(model.parameters())
    x, y = sharded.batches(1)
    report = explained(2, model, optimizer, x[0], y[0])
    found = report.sharing
    assert found is not None
    assert set(found.owners) == {name for name, _ in model.named_parameters()}
    assert set(found.owners.values()) == {0, 1}
    assert json.loads(report.to_json())["sharing"]["owners"] == found.owners
    text = str(report)
    assert "updates shared out" in text
    assert "wholly on rank 1" in text
    assert "given by a rank to the others per window: sums" in text
    assert "sharing-table" in report.to_html()


def test_norms_are_sent_beside() -> None:
    model = sharded.net()
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = sharded.batches(1)
    report = gradsync_fx.explain(
        sharded.clipped(2.0), model, optimizer, x[0], y[0], world_size=2, shard_optimizer=True
    )
    assert report.sharing is not None
    assert report.sharing.other_bytes > 0


def test_nothing_without() -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(4, 8), torch.randn(4, 8)
    report = gradsync_fx.explain(plain_step, model, optimizer, *data, world_size=2)
    assert report.sharing is None
    assert "shared out" not in str(report)


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize("name", ["AdamW", "Adafactor"])
def test_bytes_are_those_that_are_held(ranks: Ranks, name: str) -> None:
    both = ranks(sharded.reported, name)
    for one in both:
        assert one["told"] == one["held"]
    assert sum(one["held"] for one in both) == both[0]["whole"]
