"""What is trained: each workload is a model, its batches and its loss; the ways to train it are in ways.py.

Dropout is off everywhere. Compiled and eager dropout draw other random numbers, and then nobody could tell whether two
ways compute the same.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn


sys.path.append(str(Path(__file__).resolve().parent.parent))  # the GPT of the other examples
from tiny_gpt import GPT  # known only from here on


@dataclass(frozen=True)
class Workload:
    """`build` makes the model, `batch` a micro-batch from random numbers, `loss` what is trained with."""

    title: str
    build: Callable[[], nn.Module]
    batch: Callable[[Generator], Any]
    loss: Callable[[nn.Module, Any], Tensor]


def _gpt(depth: int) -> Workload:
    """Little arithmetic for each parameter: 2 sequences of 64 bytes."""

    def batch(random: Generator) -> Tensor:
        return torch.randint(256, (2, 65), generator=random)

    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

    def build() -> nn.Module:
        return GPT(width=384, depth=depth, heads=6, length=64)

    return Workload(f"GPT of {depth} layers, 2 x 64 tokens", build, batch, loss)


def _bert(layers: int) -> Workload:
    """Hugging Face's classifier with the shape of the task MRPC: pairs of sentences, 2 classes, padded to 64 tokens."""

    def build() -> nn.Module:
        # Imported here: it takes seconds, and the other workloads do without.
        from transformers import BertConfig, BertForSequenceClassification

        config = BertConfig(
            hidden_size=256,
            num_hidden_layers=layers,
            num_attention_heads=4,
            intermediate_size=1024,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        model = BertForSequenceClassification(config)
        # Else BERT notes it down at its first call, and the second one would be traced anew.
        model.config.problem_type = "single_label_classification"
        return model

    def batch(random: Generator) -> dict[str, Tensor]:
        lengths = torch.randint(24, 65, (8, 1), generator=random)
        return {
            "input_ids": torch.randint(1000, 30000, (8, 64), generator=random),
            "attention_mask": (torch.arange(64) < lengths).long(),
            "labels": torch.randint(2, (8,), generator=random),
        }

    return Workload(f"BERT of {layers} layers, 8 x 64 tokens", build, batch, _loss_of_its_own)


def _resnet(depths: list[int]) -> Workload:
    """Hugging Face's ResNet on 64 x 64 pixels: BatchNorm's buffers also want to be equal on the ranks."""

    def build() -> nn.Module:
        from transformers import ResNetConfig, ResNetForImageClassification

        config = ResNetConfig(
            embedding_size=64,
            hidden_sizes=[64, 128, 256, 512][: len(depths)],
            depths=depths,
            layer_type="basic",
            num_labels=10,
            problem_type="single_label_classification",
        )
        return ResNetForImageClassification(config)

    def batch(random: Generator) -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(8, 3, 64, 64, generator=random),
            "labels": torch.randint(10, (8,), generator=random),
        }

    title = f"ResNet of {2 * sum(depths) + 2} layers with BatchNorm, 8 x 64 x 64 pixels"
    return Workload(title, build, batch, _loss_of_its_own)


def _loss_of_its_own(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def _tiny() -> Workload:
    """Only to try the scripts."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4))

    def batch(random: Generator) -> tuple[Tensor, Tensor]:
        x = torch.randn(8, 16, generator=random)
        return x, x[:, :4].argmax(1)

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    return Workload("two linear layers", build, batch, loss)


WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "gpt": lambda quick: _gpt(1 if quick else 7),
    "bert": lambda quick: _bert(1 if quick else 4),
    "resnet": lambda quick: _resnet([1, 1] if quick else [2, 2, 2, 2]),
    "tiny": lambda quick: _tiny(),
}


def batches(workload: Workload, rank: int, count: int, device: torch.device) -> list[Any]:
    """The first micro-batches of a rank: the same at every call, others on every rank."""
    random = Generator().manual_seed(1 + rank)
    return [_moved(workload.batch(random), device) for _ in range(count)]


def _moved(batch: Any, device: torch.device) -> Any:
    if isinstance(batch, dict):
        return {name: tensor.to(device) for name, tensor in batch.items()}
    if isinstance(batch, tuple):
        return tuple(tensor.to(device) for tensor in batch)
    return batch.to(device)
