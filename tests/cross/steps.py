"""Steps of which the code for a GPU is made: models, optimizers and options by a `Case`, all tensors fake."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import gradsync_fx
from gradsync_fx.ir.program import Program
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from tests.cross.cases import Case


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = (
            part.view(rows, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.after(x))))


class GPT(nn.Module):
    """Blocks with torch's attention, and dropout after the embeddings and in the attention."""

    def __init__(self, blocks: int, dropout: float, checkpointing: bool, size: int = 1) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        words, width, length = 256 // size**2, 64 // size, 32 // size
        self.words = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, 2, dropout) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.dropout(self.words(x) + self.places)
        mixed = again(self.blocks, embedded) if self.checkpointing else self.blocks(embedded)
        return self.head(self.norm(mixed)).flatten(0, 1)


class Residual(nn.Module):
    """Two convolutions with BatchNorm beside a shorter way."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.main = nn.Sequential(
            nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short = nn.Conv2d(before, after, 1, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.short(x))


def resnet() -> nn.Module:
    pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return nn.Sequential(Residual(3, 16), Residual(16, 32), pooled)


class Bert(nn.Module):
    """BERT of transformers with a head for two classes; its logits."""

    def __init__(self) -> None:
        super().__init__()
        # Takes longer to import than all else, and few processes need it.
        from transformers import BertConfig, BertForSequenceClassification

        sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
        config = BertConfig(
            num_hidden_layers=1, num_attention_heads=2, max_position_embeddings=32, **sizes
        )
        self.inner = BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(input_ids=x).logits
        return logits


class Mlp(nn.Module):
    def __init__(self, checkpointing: bool) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.LayerNorm(128))
        self.middle = nn.Sequential(nn.Linear(128, 128), nn.GELU())
        self.last = nn.Linear(128, 32)
        self.checkpointing = checkpointing

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(again(self.middle, x) if self.checkpointing else self.middle(x))


def again(module: nn.Module, x: Tensor) -> Tensor:
    """Computed again in backward."""
    found: Tensor = checkpoint(module, x, use_reentrant=False)
    return found


def parts(case: Case) -> tuple[nn.Module, Tensor, Tensor]:
    """The model and a batch."""
    if case.model == "mlp":
        return Mlp(case.checkpointing), torch.randn(16, 64), torch.randint(32, (16,))
    if case.model == "odd":  # no size is a multiple of 4
        layers = [nn.Linear(7, 10), nn.GELU(), nn.Linear(10, 3), nn.GELU(), nn.Linear(3, 5)]
        return nn.Sequential(*layers), torch.randn(16, 7), torch.randint(5, (16,))
    if case.model == "resnet":
        return resnet(), torch.randn(4, 3, 16, 16), torch.randint(10, (4,))
    if case.model == "bert":
        return Bert(), torch.randint(128, (4, 16)), torch.randint(2, (4,))
    if case.model == "small_gpt":
        small = GPT(1, 0.0, case.checkpointing, size=4)
        return small, torch.randint(16, (2, 8)), torch.randint(16, (16,))
    model = GPT(case.blocks, 0.1, case.checkpointing)
    return model, torch.randint(256, (2, 32)), torch.randint(256, (64,))


def optimizers(case: Case, model: nn.Module) -> dict[Optimizer, list[nn.Parameter]]:
    """One for all parameters, or one for the matrices and another for the rest: with a k for each, and with Muon."""
    every = list(model.parameters())
    made: dict[str, Callable[[Any], Optimizer]] = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-3),
        "muon": lambda p: torch.optim.Muon(p, lr=1e-3, ns_steps=2),  # of 5, which are all alike
    }
    if case.optimizer != "muon" and not case.k_each:
        return {made[case.optimizer](every): every}
    matrices = [p for p in every if p.dim() == 2]
    rest = [p for p in every if p.dim() != 2]
    return {made[case.optimizer](matrices): matrices, made["adamw"](rest): rest}


def step_of(case: Case, held: dict[Optimizer, list[nn.Parameter]]) -> Callable[..., Tensor]:
    """The train step, written as without the library."""

    def train_step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        lower = (
            torch.autocast("cuda", torch.bfloat16)
            if case.precision == "autocast"
            else nullcontext()
        )
        with lower:
            loss = F.cross_entropy(model(x), y)
        if case.weights:
            gradsync_fx.micro_batch_weight((y != 0).sum())
        loss.backward()
        for optimizer, parameters in held.items():
            if case.clip:
                nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return train_step


def window_of(case: Case, held: dict[Optimizer, list[nn.Parameter]]) -> dict[str, Any]:
    """The options that say what a window is."""
    each = dict(zip(held, (4, 2), strict=False))
    return {
        "gradient_accumulation_steps": each if case.k_each else 4,
        "reduction": "weighted" if case.weights else "mean",
        "skip_nonfinite": case.skip_nonfinite,
    }


@contextmanager
def captured(case: Case) -> Iterator[Any]:
    """The captured step of a case, over `case.ranks` ranks that are not there."""
    with _ranks(case.ranks):
        dtype = torch.bfloat16 if case.precision == "bf16" else torch.float32
        with FakeTensorMode(), torch.device("cuda:0"), _default(dtype):
            model, x, y = parts(case)
        held = optimizers(case, model)
        options = window_of(case, held) | {
            "bucket_cap_mb": case.bucket_cap_mb,
            "sync_each_batch": case.sync_each_batch,
            "reduce_dtype": torch.bfloat16 if case.wire else None,
            "dynamic": True if case.dynamic else None,
            "without": ("shared_compile", *case.without),  # of processes of one host: there is one
        }
        step = OptimizedStep(step_of(case, held), Options.of(options), simulated=case.ranks)
        written_out = sdpa_kernel(SDPBackend.MATH) if case.attention_in_products else nullcontext()
        with written_out:
            step.capture(model, x, y)
        (one,) = step._executor.catalogue.captures
        yield one


def programs_of(case: Case, step: Any) -> dict[str, Program]:
    """Of a captured step, ahead of lowering."""
    every = frozenset(step.facts.parts)
    closing = {"accumulate": frozenset(), "boundary": every, "tail": every}
    return {name: step.programs.build(closing[name], tail=name == "tail") for name in case.programs}


@contextmanager
def _default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def _ranks(count: int) -> Iterator[None]:
    """A group of torch's fake kind."""
    if count < 2:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()
