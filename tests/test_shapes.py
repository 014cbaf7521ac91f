"""Batches of other sizes and lengths: one window over all of them, and no compilation after the second size."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import drive, plain_step, quick, step_of
from tests.eagerly import programs
from tests.models import mlp
from tests.reference import Window, accumulation
from tests.scripts import play
from tests.truth import Rules, Slot, same
from tests.workers import Ranks


def batches(*sizes: int) -> Window:
    source = torch.Generator().manual_seed(0)
    return [
        (torch.randn(n, 8, generator=source), torch.randn(n, 1, generator=source)) for n in sizes
    ]


@pytest.mark.parametrize(("dynamic", "compiled"), [(None, [2, 4, 4]), (True, [2, 2, 2])])
def test_batches_of_other_sizes(dynamic: bool | None, compiled: list[int]) -> None:
    """As in torch.compile: the second size makes it dynamic; `dynamic=True` from the start."""
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (model, other))
    step = quick(plain_step, 2, dynamic=dynamic)
    windows = [batches(4, 4), batches(3, 5), batches(7, 2)]
    for count, window in zip(compiled, windows, strict=True):
        drive(step, model, optimizer, [window])
        assert step.compile_count == programs(count)
        accumulation(other, theirs, [window])
        for mine, its in zip(model.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


def test_a_window_of_both_programs() -> None:
    """The last batch of the data is short: its sum goes where the others' are."""
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    step = quick(plain_step, 4)
    window = batches(4, 4, 4, 1)
    drive(step, model, optimizer, [window])
    accumulation(other, theirs, [window])
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


class Reader(nn.Module):
    """Attention over sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        return self.out(self.attend(hidden, hidden, hidden, need_weights=False)[0])


def test_sequences_of_other_lengths() -> None:
    def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
        logits = model(tokens[:, :-1])
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    model = Reader()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (model, other))
    step = quick(step_of(loss_of), 2)
    windows: list[Any] = [
        [(torch.randint(11, (2, a)),), (torch.randint(11, (2, b)),)]
        for a, b in ((6, 6), (9, 4), (5, 12), (7, 8))
    ]
    counts = []
    for window in windows:
        drive(step, model, optimizer, [window])
        counts.append(step.compile_count)
    accumulation(other, theirs, windows, loss_of)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-5, rtol=0)
    assert counts[1:] == [counts[1]] * 3


def test_returned_values_and_gradients_of_inputs_have_the_size_of_their_call() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = model(x)
        nn.functional.mse_loss(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        return out

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ours = quick(step, 2)
    for x, y in batches(4, 4, 3, 5, 2):
        given, wanted = x.clone().requires_grad_(), x.clone().requires_grad_()
        right = model(wanted)
        (gradient,) = torch.autograd.grad(nn.functional.mse_loss(right, y), wanted)
        torch.testing.assert_close(ours(model, optimizer, given, y), right.detach())
        torch.testing.assert_close(given.grad, gradient)
    ours.flush()


@pytest.mark.gloo
def test_ranks_with_other_shapes_at_the_same_time(ranks: Ranks) -> None:
    """Only rank 1 compiles anew, in an accumulate call: nobody waits for it there."""
    rows = ([4] * 8, [4, 4, 4, 3, 5, 2, 4, 6])
    scripts: Any = [
        [Slot(10 * rank + n, size) for n, size in enumerate(sizes, 1)]
        for rank, sizes in enumerate(rows)
    ]
    both = ranks(play, scripts, Rules(4, "mean"), {})
    for found in both:
        same(found["ours"], found["truth"], 1e-6)
        assert all(count == (0, 0) for i, count in enumerate(found["collectives"]) if i % 4 != 3)
    for mine, other in zip(both[0]["ours"], both[1]["ours"], strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
