"""Python numbers that a step changes: with an update where they feed nothing but updates, in every call otherwise."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import mse, regression
from tests.refusals import refused
from tests.scenarios import counted
from tests.scenarios.counted import Average, Counted, averaging, reference
from tests.workers import Ranks


pytestmark = pytest.mark.captured
BACKENDS = ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_count_of_an_average(k: int, backend: str) -> None:
    """Two windows, a skip in a last slot, and a flush."""
    model = mlp()
    twin = copy.deepcopy(model)
    average, other = Average(model), Average(twin)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step = quick(averaging, k, backend=backend)
    windows = [*regression(2, k), *regression(2, max(1, k - 1), seed=3)]
    for i, window in enumerate(windows):
        for batch in window:
            step(model, average, optimizer, *batch)
        if step.pending and i == 2:
            step.skip()
        step.flush()
    reference(twin, other, theirs, windows)
    assert average.count == other.count == 4
    assert average.seen == sum(map(len, windows))
    for p, q in zip(average.slow.parameters(), other.slow.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


@pytest.mark.gloo
@pytest.mark.inductor
def test_on_two_ranks(ranks: Ranks) -> None:
    found = ranks(counted.averages)
    for one, both in zip(found[0], found[1], strict=True):
        assert torch.equal(one, both)


def test_a_number_that_feeds_the_update_is_refused_where_it_cannot_wait() -> None:
    counts = {"n": 0}

    def step(model: nn.Module, slow: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x, y)
        counts["n"] += 1
        with torch.no_grad():
            for p, q in zip(slow.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 1 / (1 + counts["n"]))

    def run(k: int) -> None:
        model = mlp()
        slow, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.1)
        stepped = quick(step, k)
        for batch in regression(3, 1):
            stepped(model, slow, optimizer, *batch[0])

    error = refused(gradsync_fx.CaptureError, "number", run, 2)
    assert "attribute" in error.fix
    run(1)


def test_a_number_that_feeds_the_loss_too_changes_on_every_call() -> None:
    class Warm:
        n = 0

    def step(model: nn.Module, warm: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        warm.n += 1
        loss = mse(model, x, y) * (1 / warm.n)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model, warm = mlp(), Warm()
    twin = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    run, windows = quick(step, 2), regression(3, 2)
    for batch in (b for window in windows for b in window):
        run(model, warm, optimizer, *batch)
    n = 0
    for window in windows:
        for batch in window:
            n += 1
            (mse(twin, *batch) / n / 2).backward()
        theirs.step()
        theirs.zero_grad()
    assert warm.n == n == 6
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


def test_a_class_of_users_with_a_ramp() -> None:
    """A decay of `min(...)` and a branch on the count."""
    model = mlp()
    twin = copy.deepcopy(model)
    average, other = Counted(model), Counted(twin)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    step, windows = quick(averaging, 2), regression(4, 2)
    for batch in (b for window in windows for b in window):
        step(model, average, optimizer, *batch)
    reference(twin, other, theirs, windows)
    assert average.count == other.count == 4
    for p, q in zip(average.slow.parameters(), other.slow.parameters(), strict=True):
        torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


def test_a_count_that_begins_as_an_entry_of_its_class() -> None:
    """`n = 0` in the class, `self.n += 1` in a method: the instance has it from the first call on."""

    class Begins:
        n = 0

    class Average(Begins):
        def update(self, slow: nn.Module, model: nn.Module) -> None:
            self.n += 1
            with torch.no_grad():
                for p, q in zip(slow.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 1 / (1 + self.n))

    def step(
        model: nn.Module, slow: nn.Module, average: Any, optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> None:
        plain_step(model, optimizer, x, y)
        average.update(slow, model)

    model = mlp()
    twin, slow = copy.deepcopy(model), copy.deepcopy(model)
    theirs, slow_theirs = copy.deepcopy(model), Average()
    mine, average = torch.optim.SGD(model.parameters(), lr=0.1), Average()
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    stepped = quick(step, 2)
    for window in regression(3, 2):
        for x, y in window:
            stepped(model, slow, average, mine, x, y)
            (F.mse_loss(twin(x), y) / 2).backward()
        plain.step()
        plain.zero_grad()
        slow_theirs.update(theirs, twin)
        assert average.n == slow_theirs.n
    for p, q in zip(slow.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class Lookahead:
    """Every second update moves slow weights: a branch after the update reads a count that is set there."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(4, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.count, self.calls = 0, 0
        self.slow = self.model.weight.detach().clone()

    def after(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                self.slow.lerp_(self.model.weight, 0.5)
                self.model.weight.copy_(self.slow)

    def loss(self, x: Tensor) -> Tensor:
        """A branch of forward, too: its count is one of calls."""
        self.calls += 1
        return self.model(x).square().mean() * (2.0 if self.calls % 3 == 0 else 1.0)


def test_a_count_that_a_branch_after_the_update_reads() -> None:
    ours, plain = Lookahead(), Lookahead()
    data = [torch.randn(3, 4) for _ in range(9)]

    def train_step(x: Tensor) -> None:
        ours.loss(x).backward()
        ours.after()

    step = quick(train_step, 2)
    for number, x in enumerate(data, 1):
        step(x)
        (plain.loss(x) / (1 if number == len(data) else 2)).backward()
        if number % 2 == 0:
            plain.after()
        if number == len(data):
            plain.after()
            step.flush()
        assert (ours.count, ours.calls) == (plain.count, plain.calls)
        torch.testing.assert_close(ours.model.weight, plain.model.weight)
        torch.testing.assert_close(ours.slow, plain.slow)
