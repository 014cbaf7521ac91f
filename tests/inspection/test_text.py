"""The tables of a report: short for large models, and right at the width of a small terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gradsync_fx
from gradsync_fx.inspection.report import Report
from gradsync_fx.inspection.text import MANY, to_text
from tests.drive import plain_step
from tests.models import mlp


def explained(layers: int, **options: Any) -> Report:
    """A chain of equal layers, with a bucket for each."""
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))
    data = torch.randn(4, 512), torch.randn(4, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"gradient_accumulation_steps": 4, "bucket_cap_mb": 1.0, **options}
    return gradsync_fx.explain(plain_step, model, optimizer, *data, **options)


def buckets(report: Report, width: int = 100) -> list[str]:
    lines = to_text(report, width).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("bucket"))
    return lines[start + 1 : lines.index("", start)]


def test_many_buckets_are_folded_and_json_has_all() -> None:
    report = explained(20, world_size=8)
    rows = buckets(report)
    assert [row.split()[0] for row in rows] == ["0", "1", "2", "...", "19"]
    assert rows[3].split(maxsplit=1)[1] == "16 more, all 1.0 MiB: 16 parameters"
    assert len(report.collectives) == 20


def test_few_buckets_are_all_there() -> None:
    assert len(buckets(explained(MANY, world_size=8))) == MANY


@pytest.mark.parametrize("width", [80, 120])
def test_rows_fit_the_width_and_end_with_a_character(width: int) -> None:
    lines = to_text(explained(20, world_size=8), width).splitlines()
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)


def test_one_rank_is_one_rank() -> None:
    text = to_text(explained(2, world_size=1))
    assert "one window: k = 4 micro-steps, 1 rank, simulated" in text
    assert "speed-up" not in text


def test_clipping_has_a_name() -> None:
    def step(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for p in model.parameters():
            p.grad.mul_(2.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 8), torch.randn(4, 1)
    report = gradsync_fx.explain(step, model, optimizer, *data, gradient_accumulation_steps=2)
    nodes = {region.role: region.nodes for region in report.regions}
    assert nodes["clipping"] > nodes["other"] > 0
    (line,) = next(region.lines for region in report.regions if region.role == "clipping")
    source = Path(__file__).read_text().splitlines()
    assert "clip_grad_norm_" in source[int(line.rsplit(":")[-1]) - 1]


def test_a_line_that_torch_did_not_record_is_no_line() -> None:
    """Of BatchNorm's backward, for one."""
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(4, 8), torch.randn(4, 1)
    report = gradsync_fx.explain(plain_step, model, optimizer, *data)
    lines = [line for region in report.regions for line in region.lines]
    assert lines
    assert all(line.rpartition(":")[2].isdecimal() for line in lines)
