"""Embeddings with sparse gradients are refused with the parameter's name, and both ways out work."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import quick
from tests.reference import assert_same_parameters
from tests.refusals import refused


class Words(nn.Module):
    """A table of words, looked up in one of three ways."""

    def __init__(self, kind: str, padding: int | None, *, sparse: bool) -> None:
        super().__init__()
        bag = kind == "bag"
        table: Any = nn.EmbeddingBag if bag else nn.Embedding
        how = {"mode": "sum"} if bag else {}
        self.table = table(10, 4, padding_idx=padding, sparse=sparse, **how)
        self.by_function, self.sparse = kind == "function", sparse

    def forward(self, tokens: Tensor) -> Tensor:
        if self.by_function:
            return F.embedding(tokens, self.table.weight, sparse=self.sparse)
        out: Tensor = self.table(tokens)
        return out


def step(model: nn.Module, optimizer: Optimizer, tokens: Tensor) -> Tensor:
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


KINDS = [("module", None), ("module", 0), ("function", None), ("bag", None), ("bag", 0)]


@pytest.mark.parametrize(("kind", "padding"), KINDS)
def test_it_is_named_and_the_advice_works(kind: str, padding: int | None) -> None:
    torch.manual_seed(0)
    sparse = Words(kind, padding, sparse=True)
    start = copy.deepcopy(sparse.state_dict())
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.5)
    data = [torch.randint(0, 10, (3, 5)) for _ in range(4)]
    error = refused(
        gradsync_fx.CaptureError,
        "parameter 'table.weight'",
        quick(step, 2),
        sparse,
        optimizer,
        data[0],
    )
    assert "sparse" in error.seen
    assert "sparse=False" in error.fix
    assert 'on_unsupported="eager"' in error.fix
    dense, plain = Words(kind, padding, sparse=False), Words(kind, padding, sparse=True)
    for model in (dense, plain):
        model.load_state_dict(start)
    own, reference = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (dense, plain))
    captured, eager = quick(step, 2), quick(step, 2, on_unsupported="eager")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        for i, tokens in enumerate(data):
            captured(dense, own, tokens)
            eager(sparse, optimizer, tokens)
            (plain(tokens).square().mean() / 2).backward()
            if i % 2:
                reference.step()
                reference.zero_grad()
    assert_same_parameters(dense, plain)
    assert_same_parameters(sparse, plain)


def test_a_frozen_table_may_be_sparse() -> None:
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 1))
    model[0].weight.requires_grad_(False)
    run = quick(step, 1)
    run(model, torch.optim.SGD(model.parameters(), lr=0.5), torch.arange(5))
    assert run.optimizer_step == 1
