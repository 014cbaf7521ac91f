"""Ready-made callbacks for `on_update`: what each library's own reader finds afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

import gradsync_fx


UPDATES = 3
NUMBERS = {
    "micro_step",
    "slots",
    "bytes_sent",
    "accumulate_seconds",
    "boundary_seconds",
    "exposed_seconds",
    "loss",
    "terms",
    "skipped",
    "learning_rate",
    "gradient_norm",
}


def trained(on_update: Callable[[gradsync_fx.UpdateRecord], Any]) -> list[dict[str, Any]]:
    """The records of a short run, which were handed to a callback, too."""
    found = []

    def both(record: gradsync_fx.UpdateRecord) -> None:
        on_update(record)
        found.append(record.as_dict())

    def train_step(
        model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor
    ) -> torch.Tensor:
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=2, on_update=both, backend="aot_eager"
    )
    for _ in range(2 * UPDATES):
        step(model, optimizer, torch.randn(3, 4))
    return found


@pytest.mark.captured
def test_json_lines(tmp_path: Path) -> None:
    from gradsync_fx.integrations.json_lines import to_json_lines

    path = tmp_path / "run.jsonl"
    records = trained(to_json_lines(path))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        json.loads(json.dumps(record)) for record in records
    ]
    assert [record["update"] for record in records] == [1, 2, 3]


@pytest.mark.captured
def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    from gradsync_fx.integrations.tensorboard import to_tensorboard

    with SummaryWriter(str(tmp_path)) as writer:
        records = trained(to_tensorboard(writer, prefix="train/"))
    events = EventAccumulator(str(tmp_path)).Reload()
    assert {tag.removeprefix("train/") for tag in events.Tags()["scalars"]} == NUMBERS
    drawn = [(e.step, e.value) for e in events.Scalars("train/loss")]
    assert drawn == [(r["update"], pytest.approx(r["loss"], rel=1e-6)) for r in records]


@pytest.mark.captured
def test_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import wandb

    from gradsync_fx.integrations.wandb import to_wandb

    monkeypatch.setenv("WANDB_SILENT", "true")
    with wandb.init(mode="offline", dir=str(tmp_path), project="gradsync_fx") as run:
        records = trained(to_wandb(run))
        shown = dict(run.summary)
    assert shown["update"] == UPDATES
    assert {name for name in shown if not name.startswith("_")} == {*NUMBERS, "update"}
    assert shown["loss"] == pytest.approx(records[-1]["loss"])
    assert list(tmp_path.rglob("*.wandb"))


@pytest.mark.captured
def test_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file store asks to be allowed."""
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    from gradsync_fx.integrations.mlflow import to_mlflow

    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        records = trained(to_mlflow())
    client = mlflow.MlflowClient()
    drawn = client.get_metric_history(run.info.run_id, "loss")
    assert [m.step for m in drawn] == [1, 2, 3]
    assert [m.value for m in drawn] == pytest.approx([r["loss"] for r in records])
    assert set(client.get_run(run.info.run_id).data.metrics) == NUMBERS


@pytest.mark.captured
def test_progress_line() -> None:
    from gradsync_fx.integrations.progress_line import to_progress_line

    out = StringIO()
    console = Console(file=out, width=100, force_terminal=True, legacy_windows=False)
    records = trained(to_progress_line(UPDATES, console=console))
    assert f"{UPDATES}/{UPDATES}" in out.getvalue()
    assert f"loss {records[-1]['loss']:.4g}" in out.getvalue()
