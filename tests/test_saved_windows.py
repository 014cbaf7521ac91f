"""Stop at every position of a window, load into fresh objects, go on: bitwise the run that never stopped."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx import StateError
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import Counting
from tests.reference import regression
from tests.refusals import refused


def fresh(counting: bool = False) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = mlp()
    make = Counting if counting else torch.optim.AdamW
    optimizer: Any = make(model.parameters())
    return model, optimizer, quick(plain_step, 4)


@pytest.mark.parametrize("counting", [False, True])
@pytest.mark.parametrize("stop", range(9))
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(stop: int, counting: bool) -> None:
    (data,) = regression(1, 12, seed=1)
    model, optimizer, run = fresh(counting)
    for b in data:
        run(model, optimizer, *b)

    first, first_optimizer, first_run = fresh(counting)
    for b in data[:stop]:
        first_run(first, first_optimizer, *b)
    file = io.BytesIO()
    torch.save(
        {
            "model": first.state_dict(),
            "optimizer": first_optimizer.state_dict(),
            "window": first_run.state_dict(),
        },
        file,
    )
    file.seek(0)
    saved = torch.load(file, weights_only=True)

    second, second_optimizer, second_run = fresh(counting)
    second.load_state_dict(saved["model"])
    second_optimizer.load_state_dict(saved["optimizer"])
    second_run.load_state_dict(saved["window"])
    assert (second_run.micro_step, second_run.pending) == (stop, stop % 4)
    for b in data[stop:]:
        second_run(second, second_optimizer, *b)
    assert (second_run.micro_step, second_run.optimizer_step) == (12, 3)
    for a, b in zip(model.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert repr(optimizer.state_dict()) == repr(second_optimizer.state_dict())


@pytest.mark.captured
def test_prepare_compiles_and_runs_nothing() -> None:
    model, optimizer, run = fresh()
    before = [p.detach().clone() for p in model.parameters()]
    ((data,),) = regression(1, 1)
    run.prepare(model, optimizer, *data)
    assert (run.compile_count, run.micro_step, run.pending) == (2, 0, 0)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert not optimizer.state
    assert set(run.state_dict()["rank0"]["accumulators"]) == dict(model.named_parameters()).keys()
    for _ in range(4):
        run(model, optimizer, *data)
    assert (run.compile_count, run.optimizer_step) == (2, 1)


def test_what_does_not_fit_is_refused_with_both_values() -> None:
    model, optimizer, run = fresh()
    run(model, optimizer, *regression(1, 1)[0][0])
    state = run.state_dict()
    other = quick(plain_step, 2)
    with pytest.raises(StateError, match="4 in the state, 2 here, with 1 pending"):
        other.load_state_dict(state)
    with pytest.raises(StateError, match="an open window of 2 ranks: this run has 1"):
        quick(plain_step, 4).load_state_dict({**state, "world_size": 2})
    with pytest.raises(StateError, match="format"):
        run.load_state_dict({"format": 99})
    state["rank0"]["accumulators"]["0.weight"] = torch.zeros(3)
    with pytest.raises(StateError, match="shape"):
        run.load_state_dict(state)
    state["rank0"]["accumulators"] = {"elsewhere": torch.zeros(3)}
    with pytest.raises(StateError, match="4 were saved, 1 were loaded"):
        run.load_state_dict(state)
    state["parameters"] = 1
    with pytest.raises(StateError, match="only one of the saved state and this step"):
        run.load_state_dict(state)


def test_a_state_without_an_open_window_fits_another_k() -> None:
    model, optimizer, run = fresh()
    for b in regression(1, 4)[0]:
        run(model, optimizer, *b)
    other = quick(plain_step, 2)
    other.load_state_dict(run.state_dict())
    assert (other.micro_step, other.optimizer_step) == (4, 1)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_window_of_two_branches_goes_on_where_only_one_was_seen(prepared: bool) -> None:
    """Stopped with a term in each head; the next call is of the first head, and closes the window."""

    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, i: int) -> Tensor:
        loss = nn.functional.mse_loss(model[i](x), y)  # type: ignore[index]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    (data,) = regression(1, 3)
    first, second = quick(step, 3), quick(step, 3)
    first(model, optimizer, *data[0], 0)
    first(model, optimizer, *data[1], 1)
    if prepared:
        second.prepare(model, optimizer, *data[0], 0)
    second.load_state_dict(first.state_dict())
    second(model, optimizer, *data[2], 0)
    assert (second.optimizer_step, second.pending) == (1, 0)
    for (x, y), i in zip(data, (0, 1, 0), strict=True):
        (nn.functional.mse_loss(other[i](x), y) / 3).backward()
    theirs.step()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    "way", [copy.copy, copy.deepcopy, pickle.dumps, lambda s: torch.save(s, io.BytesIO())]
)
def test_a_step_itself_is_not_copied(way: Callable[[object], object]) -> None:
    """Before its first call and inside a window; the model that it trains is copied as ever."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = quick(plain_step, 2)
    for _ in range(2):
        error = refused(gradsync_fx.StateError, "an optimized step", lambda: way(step))
        assert "state_dict" in error.fix
        step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    way(model)
    step.discard()
