"""Trainings of Hugging Face's Trainer, through `optimize`: its parameters after every update, and its logs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer

import gradsync_fx
from gradsync_fx.integrations.transformers import GradSyncTrainer, GradSyncTrainerMixin
from tests.reference import assert_bitwise, assert_same_tensors
from tests.refusals import refused
from tests.scenarios import trained
from tests.scenarios.accelerated import launched
from tests.workers import Ranks


def check(facts: dict[str, Any], *, atol: float = 1e-6) -> None:
    ours, theirs = facts["ours"], facts["theirs"]
    assert_same_tensors(ours["run"], theirs["run"], atol=atol)
    assert ours["steps"] == theirs["steps"] == ours["updates"] > 0
    assert ours["compiled"] <= 2
    for mine, other in zip(ours["logs"], theirs["logs"], strict=True):
        assert mine == pytest.approx(other, rel=1e-4)


ADAMW = {"optim": "adamw_torch", "learning_rate": 1e-2, "warmup_steps": 2, "weight_decay": 0.1}
WAYS: dict[str, dict[str, Any]] = {
    "tokens": {},
    "k of 1": {"arguments": {"gradient_accumulation_steps": 1}},
    "adamw, warm-up": {"rows": 16, "arguments": ADAMW},
    "no clipping": {"model": "bert", "arguments": {"max_grad_norm": 0.0}},
    "clipping": {"arguments": {"max_grad_norm": 0.1}},
    "label smoothing": {"arguments": {"label_smoothing_factor": 0.1}},
    "loss function": {"model": "bert", "loss": "halved", "rows": 16},
    "compute_loss": {"model": "bert", "class": "squared", "rows": 16},
    "bf16": {"arguments": {"bf16": True}},
}


@pytest.mark.parametrize("how", WAYS.values(), ids=list(WAYS))
def test_one_rank(how: dict[str, Any], tmp_path: Path) -> None:
    atol = 1e-5 if "arguments" in how and "optim" in how["arguments"] else 1e-6
    check(trained.both(None, how, str(tmp_path)), atol=atol)


@pytest.mark.gloo
@pytest.mark.parametrize(
    "how",
    [
        {"rows": 24},
        {"rows": 32, "arguments": {"average_tokens_across_devices": False}},
        {"rows": 32, "arguments": ADAMW},
        {"model": "bert", "rows": 32},
    ],
    ids=str,
)
def test_two_ranks(ranks: Ranks, how: dict[str, Any], tmp_path: Path) -> None:
    first, second = ranks(trained.both, how, str(tmp_path))
    batches, k = how["rows"] // 4, 3
    closing = [int(i % k == k - 1 or i + 1 == batches) for i in range(batches)] * 2
    for facts in (first, second):
        check(facts, atol=1e-5 if "optim" in how.get("arguments", {}) else 1e-6)
        assert facts["ours"]["sums"] == closing
    assert_bitwise(first["ours"]["run"], second["ours"]["run"])


def test_resumed_from_a_checkpoint(tmp_path: Path) -> None:
    """Saved by Trainer at a boundary, resumed by another one: bitwise the training that went through."""
    saving = {"save_strategy": "steps", "save_steps": 1, **ADAMW}
    how = {"rows": 16, "arguments": saving}
    with launched(None):
        through = trained.trained(True, how, str(tmp_path))
    assert through["steps"] == 6
    stop = 3
    with launched(None):
        rest = trained.trained(True, how, str(tmp_path), str(tmp_path / f"checkpoint-{stop}"))
    assert rest["steps"] == 6
    expected = trained.Run([], through["run"].updates[stop:])
    assert_bitwise(rest["run"], expected)


def test_trained_twice_with_one_trainer(tmp_path: Path) -> None:
    both = []
    for ours in (False, True):
        with launched(None), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer, recorder = trained.trainer_of(ours, {}, str(tmp_path))
            trainer.train()
            trainer.train()
            both.append(recorder.run)
    assert_same_tensors(both[1], both[0], atol=1e-6)


def test_an_epoch_that_ends_inside_a_window(tmp_path: Path) -> None:
    """By a callback: nothing of the open window goes into the next epoch."""
    how = {"rows": 24, "stop_in": 5}
    with launched(None):
        facts = trained.trained(True, how, str(tmp_path))
    assert facts["steps"] == facts["updates"] == 1 + 4


def test_a_stream_that_ends_inside_a_window(tmp_path: Path) -> None:
    how = {"rows": 8, "stream": True, "arguments": {"max_steps": 3}}
    with launched(None), pytest.raises(gradsync_fx.GradSyncWarning, match="does not count"):
        trained.trained(True, how, str(tmp_path))


class _Steps(Trainer):
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Would do something of its own."""


class Stepping(GradSyncTrainerMixin, _Steps):
    pass


@pytest.mark.parametrize(
    ("what", "culprit"),
    [
        ({"gradsync_options": {"reduction": "mean"}}, "gradsync_options['reduction']"),
        ({"arguments": {"torch_compile": True}}, "torch_compile"),
        ({"class": Stepping}, "_Steps.training_step"),
    ],
    ids=str,
)
def test_refused(what: dict[str, Any], culprit: str, tmp_path: Path) -> None:
    def make() -> None:
        args = trained.TrainingArguments(
            str(tmp_path), use_cpu=True, report_to="none", **what.get("arguments", {})
        )
        kind = what.get("class", GradSyncTrainer)
        kind(trained.model_of("bert"), args, gradsync_options=what.get("gradsync_options"))

    with launched(None), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(gradsync_fx.OptionError, culprit, make)
