"""Models of transformers, tiny and at random, against eager accumulation: two windows each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import drive, quick
from tests.reference import Batch, Window, accumulation, assert_same, twins


transformers = pytest.importorskip("transformers")
Draw = Callable[[torch.Generator], Batch]


def _text(*, labels: int | None) -> Draw:
    """Tokens, and a class for each text (`labels` of them) or the text itself as labels."""

    def draw(source: torch.Generator) -> Batch:
        tokens = torch.randint(50, (2, 8), generator=source)
        return tokens, tokens if labels is None else torch.randint(labels, (2,), generator=source)

    return draw


def _images(source: torch.Generator) -> Batch:
    return torch.randn(4, 3, 16, 16, generator=source), torch.randint(3, (4,), generator=source)


def bert(dropout: float = 0.0) -> tuple[nn.Module, Draw]:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
        hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config), _text(labels=3)


def llama() -> tuple[nn.Module, Draw]:
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, intermediate_size=32, max_position_embeddings=16,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _text(labels=None)


def gpt2() -> tuple[nn.Module, Draw]:
    config = transformers.GPT2Config(
        vocab_size=50, n_embd=16, n_layer=2, n_head=2, n_positions=16,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _text(labels=None)


def resnet() -> tuple[nn.Module, Draw]:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config), _images


def own_loss(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """The loss that the model computes itself from its labels."""
    found: Tensor = model(inputs, labels=labels).loss
    return found


def labelled_step(model: nn.Module, optimizer: Optimizer, inputs: Tensor, labels: Tensor) -> Any:
    """Returns what the model gave beside the loss, too."""
    out = model(inputs, labels=labels)
    out.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return out.loss, out.logits


@pytest.mark.parametrize("make", [bert, llama, gpt2, resnet])
def test_two_windows(make: Callable[[], tuple[nn.Module, Draw]]) -> None:
    model, draw = make()
    model.train()
    ours, eager = twins(model)
    source = torch.Generator().manual_seed(1)
    data: list[Window] = [[draw(source) for _ in range(2)] for _ in range(2)]
    step = quick(labelled_step, 2)
    mine = drive(step, ours, torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9), data)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    assert_same(mine, accumulation(eager, reference, data, own_loss), atol=5e-6)
    assert step.compile_count == 2
    trained = {name for name, p in ours.named_parameters() if p.requires_grad}
    assert step.gradients().keys() == trained


def test_dropout_of_bert_has_eagers_masks() -> None:
    model, draw = bert(dropout=0.1)
    model.train()
    ours, eager = twins(model)
    source = torch.Generator().manual_seed(1)
    data: list[Window] = [[draw(source) for _ in range(2)] for _ in range(2)]
    torch.manual_seed(7)
    mine = drive(quick(labelled_step, 2), ours, torch.optim.SGD(ours.parameters(), lr=0.1), data)
    torch.manual_seed(7)
    theirs = accumulation(eager, torch.optim.SGD(eager.parameters(), lr=0.1), data, own_loss)
    assert_same(mine, theirs, atol=5e-6)
