"""Steps whose layers are compiled once train as eager ones do: on one rank; on two: test_matrix.py, model deep."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.lowering import lower
from gradsync_fx.passes import blocks
from tests.models import TinyGPT
from tests.scenarios.blocks import deep, every_layer


pytestmark = [pytest.mark.inductor, pytest.mark.captured]

K = 2


def batches(count: int) -> list[tuple[Tensor, Tensor]]:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(6, 8, generator=source), torch.randint(4, (6,), generator=source))
        for _ in range(count)
    ]


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).flatten(0, -2), y.flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, eps=1e-2)


def eager(model: nn.Module, data: list[Any], clip: bool) -> list[Tensor]:
    optimizer = optimizer_of(model)
    for number, batch in enumerate(data):
        (loss_of(model, *batch) / K).backward()
        if number % K == K - 1:
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            optimizer.step()
            optimizer.zero_grad()
    return list(model.parameters())


def ours(model: nn.Module, data: list[Any], clip: bool, **options: Any) -> list[Tensor]:
    optimizer = optimizer_of(model)

    def train_step(*batch: Tensor) -> Tensor:
        loss = loss_of(model, *batch)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=K, **options)
    with every_layer():
        for batch in data:
            step(*batch)
    return list(model.parameters())


def furthest(some: list[Tensor], others: list[Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(some, others, strict=True))


def test_layers_train_as_eager_ones_do() -> None:
    model, data = deep(5), batches(3 * K)
    before = [p.detach().clone() for p in model.parameters()]
    plain, whole = copy.deepcopy(model), copy.deepcopy(model)
    known = set(blocks.BODIES)
    trained = ours(model, data, True)
    assert len(set(blocks.BODIES) - known) >= 2, "a body forward, and one backward"
    assert furthest(trained, eager(plain, data, True)) < 2e-6
    assert furthest(trained, ours(whole, data, True, without=("blocks",))) < 2e-6
    assert furthest(trained, before) > 1e-3


def test_a_language_model_with_attention() -> None:
    """Its layers split a product in three, and hand views from forward to backward."""
    model, source = TinyGPT(layers=4), torch.Generator().manual_seed(1)
    ids = [torch.randint(17, (2, 9), generator=source) for _ in range(3 * K)]
    data = [(i[:, :-1], i[:, 1:]) for i in ids]
    plain = copy.deepcopy(model)
    known = set(blocks.BODIES)
    trained = ours(model, data, True)
    assert len(set(blocks.BODIES) - known) >= 2
    assert furthest(trained, eager(plain, data, True)) < 5e-6


def test_random_numbers_are_those_of_the_seed() -> None:
    results = []
    for seed in (3, 3):
        torch.manual_seed(0)
        model = deep(5, dropout=0.5)
        torch.manual_seed(seed)
        results.append([p.detach().clone() for p in ours(model, batches(2 * K), False)])
    assert furthest(results[0], results[1]) == 0.0


def test_torchs_random_numbers_are_eagers() -> None:
    model, data = deep(5, dropout=0.5), batches(2 * K)
    plain = copy.deepcopy(model)
    torch.manual_seed(3)
    trained = ours(model, data, False, options={"fallback_random": True})
    torch.manual_seed(3)
    assert furthest(trained, eager(plain, data, False)) < 2e-6


def test_a_body_is_compiled_for_one_step_and_read_by_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = batches(K)
    ours(deep(4), data, False)
    compiled: list[int] = []
    plain = lower._compiled

    def counted(module: Any, *args: Any) -> Any:
        compiled.append(len(module.graph.nodes))
        return plain(module, *args)

    monkeypatch.setattr(lower, "_compiled", counted)
    ours(deep(7), data, False)
    assert len(compiled) == 3, "accumulate, boundary and the update; no body"


SCRIPT = """
import torch
from tests.scenarios.blocks import deep
from tests.test_blocks import batches, ours
torch.manual_seed(0)
print(sum(hash(v) for p in ours(deep(4), batches(4), False) for v in p.flatten().tolist()))
"""


def test_a_second_process_finds_bodies_in_the_cache(tmp_path: Path) -> None:
    root = str(Path(gradsync_fx.__file__).parents[1])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}

    def run() -> tuple[str, int]:
        command = [sys.executable, "-c", SCRIPT]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout, len(list(tmp_path.rglob("*.main.so")))

    first = run()
    assert run() == first
