"""Estimated peak memory, beside the peak of torch's own record of allocations in a warm call of the default backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from transformers import BertConfig, BertForSequenceClassification

import gradsync_fx
from gradsync_fx.inspection.memory import peak_of
from tests.models import TinyGPT


K = 2


class Residual(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.last = nn.BatchNorm2d(after)
        self.short = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.second(F.relu(self.norm(self.first(x))))
        return F.relu(self.last(inner) + self.short(x))


def gpt() -> tuple[nn.Module, Tensor, Tensor]:
    return TinyGPT(64, 64, 2), torch.randint(64, (64, 8)), torch.randint(64, (64, 8))


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        config = BertConfig(
            vocab_size=200,
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=64,
        )
        self.model = BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.model(input_ids=x).logits
        return found


def bert() -> tuple[nn.Module, Tensor, Tensor]:
    return Bert(), torch.randint(200, (16, 64)), torch.randint(2, (16,))


def resnet() -> tuple[nn.Module, Tensor, Tensor]:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, 1, 1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16, 16, 1),
        Residual(16, 32, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )
    return model, torch.randn(16, 3, 32, 32), torch.randint(10, (16,))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def allocated(call: Any) -> int:
    """The most bytes that a call has allocated at one time."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        kept = call()
    events = [e for e in record.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    del kept
    return most


@pytest.mark.captured
@pytest.mark.inductor
@pytest.mark.parametrize("build", [gpt, bert, resnet])
def test_the_estimate_is_what_a_warm_call_allocates(build: Any) -> None:
    model, x, y = build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=K)
    for _ in range(2 * K):
        step(model, optimizer, x, y)
    memory = step.report().memory
    assert memory is not None
    estimated = {p.name: p.temporaries for p in memory.programs}
    for name in ("accumulate", "boundary"):
        seen = allocated(lambda: step(model, optimizer, x, y))
        assert seen > 100_000, "nothing of a size to compare"
        assert 0.9 * seen < estimated[name] < 1.1 * seen, name


@pytest.mark.captured
def test_what_is_held() -> None:
    model, x, y = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    report = gradsync_fx.explain(train_step, model, optimizer, x, y, gradient_accumulation_steps=K)
    assert report.memory is not None
    held = report.memory.held
    assert held["parameter"] == held["accumulator"] == size
    assert held["state"] == 2 * size
    assert held["data"] == x.numel() * 8 + y.numel() * 8
    most = max(p.temporaries for p in report.memory.programs)
    assert report.memory.peak == sum(held.values()) + most
    for program in report.memory.programs:
        assert max(level.bytes for level in program.levels) == program.temporaries
        places = [level.at for level in program.levels]
        assert places == sorted(set(places))
        assert 60 < len(places) <= 120
        assert any(level.line.startswith(__file__) for level in program.levels)
    assert "memory" in str(report)
    assert '"temporaries"' in report.to_json()


def test_a_value_that_is_read_late_counts_all_the_while() -> None:
    """Each product is 400 bytes; the first lives until the end, or does not."""

    def early(x: Tensor) -> Tensor:
        return x @ x @ x @ x @ x

    def late(x: Tensor) -> Tensor:
        kept = x @ x
        return kept @ x @ x @ x @ kept

    x = torch.randn(10, 10)
    assert [peak_of(make_fx(step)(x)).bytes for step in (early, late)] == [800, 1200]
