"""Numbers that move during training reach the update that they should, and compile nothing anew.

Learning rates of torch's schedulers and rates set by hand, the length of the window, and a counter in the step.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr

from tests.drive import drive, plain_step, quick, step_of
from tests.eagerly import programs
from tests.models import Lin, mlp
from tests.optimizers import OPTIMIZERS, sgd
from tests.reference import accumulation, assert_same, mse, regression, twins


def warmup(optimizer: Optimizer) -> lr.LRScheduler:
    return lr.LambdaLR(optimizer, lambda n: (n + 1) / 12)


def one_cycle(optimizer: Optimizer) -> lr.LRScheduler:
    return lr.OneCycleLR(optimizer, max_lr=1e-2, total_steps=13)


@pytest.mark.parametrize("schedule", [warmup, one_cycle])
@pytest.mark.parametrize("name", ["momentum", "AdamW"])
def test_schedulers_cost_no_compilation(
    schedule: Callable[[Optimizer], lr.LRScheduler], name: str
) -> None:
    ours, eager = twins(mlp())
    data = regression(12, 3)
    optimizer, reference = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](eager.parameters())
    mine, theirs = schedule(optimizer), schedule(reference)
    step = quick(plain_step, 3)
    found = drive(step, ours, optimizer, data, after=mine.step)
    wanted = accumulation(eager, reference, data, after=theirs.step)
    assert_same(found, wanted, atol=5e-6)
    assert step.compile_count == programs(2)
    assert mine.last_epoch == 12
    assert mine.get_last_lr() == theirs.get_last_lr()


def test_reduce_on_plateau() -> None:
    ours, eager = twins(mlp())
    data = regression(12, 3)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-2)
    reference = torch.optim.AdamW(eager.parameters(), lr=1e-2)
    mine = lr.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    theirs = lr.ReduceLROnPlateau(reference, factor=0.5, patience=1)
    step = quick(plain_step, 3)
    found = drive(step, ours, optimizer, data, after=lambda: mine.step(1.0))
    wanted = accumulation(eager, reference, data, after=lambda: theirs.step(1.0))
    assert_same(found, wanted, atol=5e-6)
    assert step.compile_count == programs(2)
    assert optimizer.param_groups[0]["lr"] == reference.param_groups[0]["lr"] < 1e-2


def test_lr_set_by_hand_takes_effect_at_the_next_update() -> None:
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 2)
    one = torch.tensor(1.0)
    step(model, optimizer, one)
    optimizer.param_groups[0]["lr"] = 8.0
    step(model, optimizer, one)
    assert model.w.item() == -8.0
    optimizer.param_groups[0]["lr"] = 0.0
    step(model, optimizer, one)
    step(model, optimizer, one)
    assert model.w.item() == -8.0
    assert step.compile_count == programs(2)


def test_k_changes_at_a_boundary_and_compiles_nothing() -> None:
    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(plain_step, 2)
    for i, k in enumerate((2, 4, 3, 2)):
        step.set_gradient_accumulation_steps(k)
        data = regression(2, k, seed=i)
        assert_same(
            drive(step, ours, optimizer, data), accumulation(eager, reference, data), atol=1e-6
        )
    assert step.compile_count == programs(2)


def test_a_python_number_that_changes_with_every_call() -> None:
    """A counter of the user's that the step reads: right results, and a bounded number of programs."""
    model = Lin()
    optimizer = sgd(model, 1.0)

    def step(x: Tensor, n: int) -> Tensor:
        loss = model(x) * n
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = quick(step, 2)
    for n in range(1, 21):
        run(torch.tensor(1.0), n)
    assert model.w.item() == -sum(range(1, 21)) / 2
    assert run.compile_count <= 4


def test_a_scheduler_inside_the_step_steps_once_for_each_update() -> None:
    """StepLR with gamma 0.5, k = 4, 8 micro-steps and a flush: lr 1/8, not 1/512; a metric goes to its scheduler."""
    model = mlp()
    optimizer = sgd(model, 1.0)
    halving = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=100)
    losses = []

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        halving.step()
        optimizer.zero_grad()
        plateau.step(loss)
        return loss

    run = quick(step, 4)
    for batch in regression(1, 9)[0]:
        losses.append(run(*batch).item())
    run.flush()
    assert (halving.last_epoch, plateau.last_epoch) == (3, 3)
    assert optimizer.param_groups[0]["lr"] == 0.125
    assert plateau.best == min(losses[3], losses[7], losses[8])
    assert run.compile_count == programs(3)


def test_counters_of_the_optimizer_count_updates() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run = quick(plain_step, 3)
    for batch in regression(1, 10)[0]:
        run(model, optimizer, *batch)
    run.flush()
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}
