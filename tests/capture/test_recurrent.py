"""LSTM, GRU and RNN layers are captured, with hidden state that is carried over micro-steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import quick
from tests.refusals import refused
from tests.scenarios import recurrent
from tests.workers import Ranks


FORMS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True},
    {"batch_first": True},
    {"bias": False},
]


def check(found: Any) -> None:
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("LSTM", how) for how in FORMS), ("GRU", FORMS[1]), ("GRU", FORMS[2]), ("RNN", FORMS[1])],
    ids=str,
)
def test_one_rank(kind: str, how: dict[str, Any]) -> None:
    check(recurrent.both(None, kind, how, "aot_eager"))


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "backend"), [("LSTM", "inductor"), ("GRU", "aot_eager")], ids=str)
def test_two_ranks(ranks: Ranks, kind: str, backend: str) -> None:
    first, second = ranks(recurrent.both, kind, {"num_layers": 2}, backend)
    for found in (first, second):
        check(found)
    for a, b in zip(first[0], second[0], strict=True):
        assert torch.equal(a, b)


def step(model: nn.Module, optimizer: Optimizer, x: Any) -> Tensor:
    out, _ = model(x)
    loss: Tensor = (
        (out.data if isinstance(out, nn.utils.rnn.PackedSequence) else out).square().mean()
    )
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_dropout_of_its_own_is_refused() -> None:
    model: Any = nn.GRU(8, 6, num_layers=2, dropout=0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = refused(
        gradsync_fx.CaptureError,
        "nn.GRU(dropout=0.5)",
        quick(step, 2),
        model,
        optimizer,
        torch.ones(3, 2, 8),
    )
    assert "nn.Dropout" in error.fix
    quick(step, 2)(model.eval(), optimizer, torch.ones(3, 2, 8))


def test_the_dropout_that_is_advised() -> None:
    """One between layers draws the masks of plain PyTorch."""

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.drop = nn.GRU(8, 6), nn.GRU(6, 6), nn.Dropout(0.5)

        def forward(self, x: Tensor) -> Any:
            return self.second(self.drop(self.first(x)[0]))

    torch.manual_seed(0)
    ours, eager = Stack(), Stack()
    eager.load_state_dict(ours.state_dict())
    x = torch.randn(3, 2, 8)
    torch.manual_seed(1)
    quick(step, 1)(ours, torch.optim.SGD(ours.parameters(), lr=0.1), x)
    torch.manual_seed(1)
    step(eager, torch.optim.SGD(eager.parameters(), lr=0.1), x)
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
