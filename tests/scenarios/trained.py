"""The same model and data, under Hugging Face's Trainer and under ours, on one rank (None) or as one of two."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from gradsync_fx.errors import GradSyncWarning
from gradsync_fx.integrations.transformers import GradSyncTrainer, GradSyncTrainerMixin
from tests.counting import counted
from tests.reference import Run
from tests.scenarios.accelerated import launched


SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 32, "max_position_embeddings": 16,
}  # fmt: skip


def model_of(kind: str) -> nn.Module:
    """A BERT, whose loss is a mean of each batch; or a Llama, whose loss is a mean over the tokens of a window."""
    torch.manual_seed(0)
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**SIZES))
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**SIZES, **quiet))


def rows_of(kind: str, count: int) -> list[dict[str, Tensor]]:
    source = torch.Generator().manual_seed(1)
    rows = []
    for _ in range(count):
        ids = torch.randint(1, 40, (8,), generator=source)
        labels = torch.randint(2, (1,), generator=source)[0]
        if kind == "llama":  # between 2 and 7 tokens of each row count
            labels = ids.clone()
            labels[: int(torch.randint(6, (1,), generator=source))] = -100
        rows.append({"input_ids": ids, "labels": labels})
    return rows


class Rows(Dataset):
    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]


class Stream(IterableDataset):
    """Rows without a length."""

    def __init__(self, rows: list[dict[str, Tensor]]) -> None:
        self.rows = rows

    def __iter__(self) -> Any:
        return iter(self.rows)


class Recorder(TrainerCallback):
    """Parameters after every update. stop_in: the micro-step of the first epoch after which that epoch ends."""

    def __init__(self, stop_in: int | None) -> None:
        self.run, self.micro_steps, self.stop_in = Run(), 0, stop_in

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.micro_steps += 1
        self.run.updated(more["model"])

    def on_substep_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self.micro_steps += 1
        if self.micro_steps == self.stop_in:
            control.should_epoch_stop = True


def halved(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A loss of the user's: half of a mean over the labels of the window."""
    total = nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
    return 0.5 * total / num_items_in_batch


class _Squared:
    """A `compute_loss` of the user's, the mean of a batch."""

    loss_is_scaled_for_ga = False

    def compute_loss(self, model: nn.Module, inputs: Any, **_: Any) -> Tensor:
        return model(**inputs)["logits"].pow(2).mean()


class Squared(_Squared, Trainer):
    pass


class SquaredOurs(_Squared, GradSyncTrainerMixin, Trainer):
    pass


def trainer_of(ours: bool, how: dict[str, Any], folder: str) -> tuple[Any, Recorder]:
    kind = how.get("model", "llama")
    arguments: dict[str, Any] = {
        "output_dir": folder, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 3,
        "num_train_epochs": 2, "report_to": "none", "use_cpu": True, "learning_rate": 0.05,
        "optim": "sgd", "logging_steps": 1, "save_strategy": "no", "disable_tqdm": True,
        **how.get("arguments", {}),
    }  # fmt: skip
    if ours:
        kinds = SquaredOurs if how.get("class") == "squared" else GradSyncTrainer
        more: dict[str, Any] = {"gradsync_options": {"backend": "aot_eager"}}
    else:
        kinds, more = (Squared if how.get("class") == "squared" else Trainer), {}
    recorder = Recorder(how.get("stop_in"))
    rows = rows_of(kind, how.get("rows", 12))
    trainer = kinds(
        model_of(kind),
        TrainingArguments(**arguments),
        train_dataset=Stream(rows) if how.get("stream") else Rows(rows),
        compute_loss_func=halved if how.get("loss") == "halved" else None,
        callbacks=[recorder],
        **more,
    )
    return trainer, recorder


def trained(ours: bool, how: dict[str, Any], folder: str, resume: Any = None) -> dict[str, Any]:
    """What a training showed. Every window's all-reduces are counted where `how` asks for it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", GradSyncWarning)
        trainer, recorder = trainer_of(ours, how, folder)
        sums: list[int] = []
        if ours:
            plain = trainer.training_step

            def counting(*args: Any) -> Tensor:
                with counted() as count:
                    result: Tensor = plain(*args)
                sums.append(count.all_reduces)
                return result

            trainer.training_step = counting
        trainer.train(resume_from_checkpoint=resume)
    told = ("loss", "grad_norm", "learning_rate", "epoch")
    logs = [[log[name] for name in told] for log in trainer.state.log_history if "loss" in log]
    facts = {"run": recorder.run, "logs": logs, "steps": trainer.state.global_step, "sums": sums}
    if ours:
        step = trainer.gradsync_step
        facts |= {"compiled": step.compile_count, "updates": step.optimizer_step}
    return facts


def both(rank: int | None, how: dict[str, Any], folder: str) -> dict[str, Any]:
    with launched(rank):
        theirs = trained(False, how, folder)
    with launched(rank):
        return {"theirs": theirs, "ours": trained(True, how, folder)}
