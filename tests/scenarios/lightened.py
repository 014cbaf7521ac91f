"""The same LightningModule, trained by Lightning and through `optimize`: on one rank (None), or as one of two."""

from __future__ import annotations

import os
import warnings
from typing import Any
from unittest import mock

import lightning.pytorch as L
import torch
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import DDPStrategy
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from torch.utils.data import DataLoader

from gradsync_fx.integrations.lightning import step_of
from tests.counting import counted
from tests.drive import quick
from tests.models import mlp
from tests.reference import Batch, Run, mse, regression
from tests.workers import WORLD


EPOCHS = 2


class Regressor(L.LightningModule):
    """Logs in both ways; `short`: what the loss of each of an epoch's last batches is multiplied by."""

    def __init__(self, how: dict[str, Any], short: dict[int, float] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.how, self.short = mlp(), how, short or {}

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        loss = mse(self.net, *batch)
        self.log("loss", loss, prog_bar=True)
        self.log_dict({"double": 2 * loss, "rows": float(len(batch[0]))})
        if self.short:
            loss = loss * self.short.get(batch_idx, 1.0)
        return {"loss": loss, "count": 1} if self.how.get("returns") == "dict" else loss

    def configure_optimizers(self) -> Any:
        adam = self.how.get("optimizer") == "adamw"
        kind: Any = torch.optim.AdamW if adam else torch.optim.SGD
        optimizer = kind(self.parameters(), lr=1e-2 if adam else 0.1)
        schedule = StepLR(optimizer, 1, gamma=0.7)
        plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        forms: dict[str, Any] = {
            "optimizer": optimizer,
            "list": [optimizer],
            "two lists": ([optimizer], [schedule]),
            "each step": [[optimizer], [{"scheduler": schedule, "interval": "step"}]],
            "dict": {"optimizer": optimizer, "lr_scheduler": schedule},
            "dict of dict": {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": schedule, "interval": "step"},
            },
            "plateau": {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": plateau, "monitor": "loss", "interval": "step"},
            },
        }
        return forms[self.how.get("form", "optimizer")]


class _Recorder(L.Callback):
    def __init__(self) -> None:
        self.run, self.updates, self.rates = Run(), 0, []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.run.losses.append(outputs["loss"].detach().clone())
        if trainer.global_step > self.updates:
            self.updates = trainer.global_step
            self.run.updated(module.net)


def _clip(how: dict[str, Any]) -> dict[str, Any]:
    kind, value = how.get("clip", ("norm", None))
    return {"gradient_clip_val": value, "gradient_clip_algorithm": kind}


def theirs(rank: int | None, how: dict[str, Any], data: list[Batch], k: int) -> tuple[Run, float]:
    """Lightning's own loop; it divides a short window by k as well, which `short` undoes."""
    rest = len(data) % k
    short = dict.fromkeys(range(len(data) - rest, len(data)), k / (rest or k))
    module, recorder = Regressor(how, short), _Recorder()
    more: dict[str, Any] = {"devices": 1}
    if rank is not None:
        more = {
            "devices": WORLD,
            "strategy": DDPStrategy(process_group_backend="gloo"),
            "plugins": [TorchElasticEnvironment()],
        }
    told = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD} if rank is not None else {}
    with (
        warnings.catch_warnings(),
        mock.patch.dict(os.environ, {name: str(value) for name, value in told.items()}),
    ):
        warnings.simplefilter("ignore")
        trainer = L.Trainer(
            accelerator="cpu", max_epochs=EPOCHS, accumulate_grad_batches=k, callbacks=[recorder],
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, use_distributed_sampler=False, **_clip(how), **more,
        )  # fmt: skip
        loader: Any = DataLoader(data, batch_size=None)  # type: ignore[arg-type]
        trainer.fit(module, loader)
    losses = [
        loss * k / scale  # Lightning hands callbacks the loss as it was divided
        if (scale := short.get(i % len(data))) is not None
        else loss * k
        for i, loss in enumerate(recorder.run.losses)
    ]
    return Run(losses, recorder.run.updates), trainer.optimizers[0].param_groups[0]["lr"]


def ours(how: dict[str, Any], data: list[Batch], k: int) -> tuple[Run, float, dict[str, Any]]:
    module, run, sums = Regressor(how), Run(), []
    parts = step_of(module, **_clip(how))
    step = quick(parts, k)
    for _ in range(EPOCHS):
        for i, batch in enumerate(data):
            with counted() as count:
                result = step(batch, i)
            sums.append(count.all_reduces)
            loss = result["loss"] if isinstance(result, dict) else result
            run.losses.append(loss)
            assert parts.logged["loss"].equal(loss)
            assert parts.logged["double"].equal(2 * loss)
            assert parts.logged["rows"] == 4.0
            if step.sync_gradients:
                run.updated(module.net)
        if step.pending:
            step.flush()
            run.updated(module.net)
        parts.end_epoch()
    facts = {"sums": sums, "compiled": step.compile_count, "updates": step.optimizer_step}
    return run, parts.optimizer.param_groups[0]["lr"], facts


def both(rank: int | None, how: dict[str, Any], batches: int, k: int) -> dict[str, Any]:
    """Two epochs of `batches` micro-steps, ours and theirs."""
    (data,) = regression(1, batches, seed=10 + (rank or 0))
    expected, expected_rate = theirs(rank, how, data, k)
    found, rate, facts = ours(how, data, k)
    return {
        "found": found,
        "expected": expected,
        "rate": rate,
        "expected_rate": expected_rate,
        **facts,
    }
