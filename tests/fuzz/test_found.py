"""What fuzzing has found, each as the smallest case of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

import gradsync_fx
from tests.drive import plain_step, quick
from tests.eagerly import asked
from tests.fuzz import slices
from tests.fuzz.cases import Case, Do
from tests.fuzz.graphs import Round, Sketch
from tests.fuzz.plain import compare
from tests.fuzz.play import play
from tests.models import mlp
from tests.reference import mse, regression


FOUND = {
    # The momentum of a scalar parameter was taken for a step counter, and its address for a tensor's: a crash.
    "scalar momentum": Case("twice", "decay", 2, (Do("call"), Do("call", 1))),
    # For its sake all step counters became tensors of float32: a float64 model was trained with six digits.
    "scalar moments": Case(
        "twice", "Adam-l2", 1, (Do("call", 31), Do("call", 85, rows=3)), loss="divided"
    ),
    # A window that was loaded and not yet called could not be discarded, and would have come back.
    "discard of a loaded window": Case(
        "linear",
        "SGD",
        3,
        (Do("call"), Do("reload"), Do("discard"), Do("call", 1), Do("call", 2), Do("call", 3)),
    ),
    # Nor could it be saved again: its sums were left out.
    "save of a loaded window": Case(
        "linear", "momentum", 2, (Do("call"), Do("reload"), Do("reload"), Do("call", 1))
    ),
    # A parameter whose only micro-step of the window was not finite was updated with a gradient of zero: its state
    # came to be, its momentum moved it.
    "a branch that only a skipped micro-step took": Case(
        "branches",
        "Adam",
        2,
        (Do("call", branch="a"), Do("call", 1, branch="both", bad=True)),
        skip_nonfinite=True,
    ),
    "a branch that only a skipped micro-step took, later": Case(
        "branches",
        "momentum",
        2,
        (
            *(Do("call", 1, branch="both"), Do("call", 2, branch="b")),
            *(Do("call", 3, branch="b", bad=True), Do("call", 4, branch="a")),
            *(Do("call", 5, branch="a"), Do("reload"), Do("call", 6, branch="b", bad=True)),
            *(Do("call", 7, branch="both", bad=True), Do("call", 8, branch="b"), Do("flush")),
        ),
        reduction="weighted",
        skip_nonfinite=True,
    ),
}


@pytest.mark.skipif(asked(), reason="cases say themselves which way they are run")
@pytest.mark.parametrize("name", FOUND)
def test_found(name: str) -> None:
    compare(FOUND[name], [play(0, FOUND[name])])


GRAPHS = {
    # The value that a scheduler is stepped with is a gradient's norm: a marker was left in the accumulate program.
    "metric of a gradient": Sketch(
        rounds=(Round(clip="norm"),),
        metric=3,
        script=(("call", 0), ("call", 1), ("call", 0), ("tail", 1)),
    ),
    # An input is written with the value of another that is written as well: it got that one's new value.
    "shifted inputs": Sketch(
        data=(1, 1, 1), writes=((1, 1), (0, 3)), script=(("call", 0), ("call", 1))
    ),
    # A gradient is read (to clip it, to update with it) before the last one of its bucket: no order was possible.
    "read before its bucket": Sketch(
        rounds=(Round(update="by hand"), Round(sources=(1,))),
        parameters=((1, 0), (1, 0)),
        data=(1, 1),
        finite=True,
        world=2,
        script=(("call", 0), ("call", 1)),
    ),
    # Windows of one call: a gradient that depends on another, reduced, was to be reduced together with it.
    "behind a reduced gradient": Sketch(
        rounds=(Round(update="by hand"), Round(sources=(4,), peeks=True)),
        parameters=((1, 0), (1, 0)),
        data=(1, 1),
        world=2,
        script=(("call", 1), ("call", 1)),
    ),
    # The weight of gradients that the step joins and reduces itself is sent alone: the proof did not allow for it.
    "weight alone": Sketch(
        rounds=(Round(sync="flat"),),
        weight=1,
        reduction="weighted",
        every=True,
        world=2,
        script=(("call", 0), ("call", 1)),
    ),
}


@pytest.mark.captured
@pytest.mark.parametrize("name", GRAPHS)
def test_found_graphs(name: str) -> None:
    slices.play(GRAPHS[name])


@pytest.mark.captured
def test_two_models_trained_in_turn() -> None:
    """The graphs' "read before its bucket", as a user writes it: one all-reduce, and the first norm after it."""

    def step(models: list[nn.Module], optimizers: list[Optimizer], x: Tensor, y: Tensor) -> None:
        for model, optimizer in zip(models, optimizers, strict=True):
            mse(model, x, y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

    models = [mlp(), mlp()]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    batch = torch.randn(4, 8), torch.randn(4, 1)
    window = {"gradient_accumulation_steps": 2, "world_size": 2}
    report = gradsync_fx.explain(step, models, optimizers, *batch, **window)
    assert [len(c.parameters) for c in report.collectives] == [8]


class Remembers(nn.Module):
    """Keeps its latest outputs, and those before them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.register_buffer("latest", torch.zeros(4, 1))
        self.register_buffer("before", torch.ones(4, 1))

    def forward(self, x: Tensor) -> Any:
        out = self.inner(x) + 0.01 * self.latest
        with torch.no_grad():
            self.before.copy_(self.latest)
            self.latest.copy_(out)
        return out


def test_a_buffer_that_takes_over_anothers_value() -> None:
    """The graphs' "shifted inputs", as a user writes it."""
    model = Remembers()
    step, optimizer = quick(plain_step, 2), torch.optim.SGD(model.parameters(), 0.1)
    for window in regression(2, 2):
        for x, y in window:
            latest = model.latest.clone()
            step(model, optimizer, x, y)
            assert torch.equal(model.before, latest)
            assert not torch.equal(model.latest, latest)


@pytest.mark.captured
def test_a_scheduler_that_is_stepped_with_the_norm() -> None:
    """The graphs' "metric of a gradient", as a user writes it: at each update with its own norm, in a flush too."""

    def step(model: nn.Module, optimizer: Optimizer, scheduler: Any, x: Tensor, y: Tensor) -> Any:
        loss = mse(model, x, y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step(norm)
        return loss

    model, twin = mlp(), mlp()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    scheduler = ReduceLROnPlateau(optimizer, mode="max")
    run = quick(step, 2)
    (first, second), (third, _) = regression(2, 2)
    norms: list[float] = []
    for window in ((first, second), (third,)):
        for x, y in window:
            run(model, optimizer, scheduler, x, y)
        if run.pending:
            run.flush()
        twin.zero_grad()
        for x, y in window:
            (mse(twin, x, y) / len(window)).backward()
        norms.append(_norm(twin))
        assert scheduler.best == pytest.approx(max(norms))
    assert scheduler.last_epoch == 2


def _norm(model: nn.Module) -> float:
    return float(
        nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    )
