"""What users do around a step, at its edges: loading, new groups, hooks, several updates, methods, exceptions."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import mse, regression
from tests.refusals import refused


(DATA,) = regression(1, 8)


def heads(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, i: int) -> Tensor:
    loss = F.mse_loss(model[i](x), y)  # type: ignore[index]
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_a_state_of_before_the_first_call_empties_the_window() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    start = step.state_dict()
    step(model, optimizer, *DATA[0])
    step.load_state_dict(start)
    assert step.pending == 0
    assert all(float(g.abs().max()) == 0 for g in step.gradients().values())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 4)
    step(model, optimizer, *DATA[0])
    state = copy.deepcopy(step.state_dict())
    step(model, optimizer, *DATA[1])
    before = {name: g.clone() for name, g in step.gradients().items()}
    last = list(state["rank0"]["accumulators"])[-1]
    state["rank0"]["accumulators"][last] = torch.zeros(3)
    with pytest.raises(gradsync_fx.StateError):
        step.load_state_dict(state)
    assert all(torch.equal(before[name], g) for name, g in step.gradients().items())
    assert step.pending == 2


def test_a_state_of_before_another_branch_was_seen() -> None:
    model = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    optimizer = sgd(model)
    step = quick(heads, 2)
    step(model, optimizer, *DATA[0], 0)
    step(model, optimizer, *DATA[1], 0)
    state = step.state_dict()
    step(model, optimizer, *DATA[2], 1)
    step.load_state_dict(state)
    assert (step.pending, step.micro_step) == (0, 2)
    assert all(float(g.abs().max()) == 0 for g in step.gradients().values())
    for p in model[0].parameters():
        p.requires_grad_(False)
    step(model, optimizer, *DATA[3], 1)


def test_the_order_of_a_mapping_does_not_count() -> None:
    a, b = nn.Linear(8, 1), nn.Linear(8, 1)
    oa, ob = sgd(a), sgd(b)

    def both(x: Tensor, y: Tensor) -> None:
        loss = F.mse_loss(a(x), y) + F.mse_loss(b(x), y)
        loss.backward()
        oa.step()
        ob.step()

    step = quick(both, {oa: 1, ob: 2})  # type: ignore[arg-type]
    step.set_gradient_accumulation_steps({ob: 3, oa: 1})
    start = a.weight.clone(), b.weight.clone()
    step(*DATA[0])
    assert not torch.equal(a.weight, start[0])
    assert torch.equal(b.weight, start[1])
    step.discard()
    with pytest.raises(gradsync_fx.WindowError, match="same optimizers"):
        step.set_gradient_accumulation_steps({sgd(a): 3, oa: 1})


def test_a_group_that_is_added_trains() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m[2].parameters(), lr=0.1) for m in (model, other))
    step = quick(plain_step, 1)
    for i, batch in enumerate(DATA[:4]):
        if i == 2:
            other.zero_grad()  # no optimizer did until now
            for o, m in ((optimizer, model), (theirs, other)):
                o.add_param_group({"params": list(m[0].parameters()), "lr": 0.05})
        step(model, optimizer, *batch)
        plain_step(other, theirs, *batch)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_are_refused_by_name_at_any_time(when: str) -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 1)
    if when == "after":
        step(model, optimizer, *DATA[0])
    model[0].weight.register_hook(lambda g: g * 0)
    refused(gradsync_fx.CaptureError, "0.weight", step, model, optimizer, *DATA[1])


def test_hooks_of_an_update_may_come_at_any_time() -> None:
    model = mlp()
    optimizer = sgd(model)
    step, seen = quick(plain_step, 1), list[bool]()
    step(model, optimizer, *DATA[0])
    optimizer.register_step_pre_hook(
        lambda o, *_: seen.append(all(p.grad is not None for p in model.parameters()))
    )
    with pytest.warns(gradsync_fx.GradSyncWarning, match="hooks"):
        step(model, optimizer, *DATA[1])
    assert seen == [True]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_steps_twice_in_a_step(momentum: float) -> None:
    """Two updates in one program without state; opaque ones with it: the second has to see what the first left."""

    def twice(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        for shift in (0.0, 1.0):
            loss = mse(model, x + shift, y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=momentum) for m in (model, other)
    )
    step = quick(twice, 1)
    for batch in DATA[:3]:
        first = step.micro_step == 0 and momentum > 0
        with (
            pytest.warns(gradsync_fx.GradSyncWarning, match="twice|once")
            if first
            else nullcontext()
        ):
            step(model, optimizer, *batch)
        twice(other, theirs, *batch)
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)


def test_an_average_of_the_weights_is_updated_by_a_flush_after_a_resume() -> None:
    model = mlp()
    optimizer = sgd(model)
    average = [p.detach().clone() for p in model.parameters()]

    def step(x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for held, p in zip(average, model.parameters(), strict=True):
                held.lerp_(p, 0.5)

    first = quick(step, 3)
    first(*DATA[0])
    second = quick(step, 3)
    second.prepare(*DATA[0])
    second.load_state_dict(first.state_dict())
    wanted = [p.detach().clone() for p in model.parameters()]
    second.flush()
    for held, before, p in zip(average, wanted, model.parameters(), strict=True):
        torch.testing.assert_close(held, before.lerp(p.detach(), 0.5))


def test_a_metric_for_a_scheduler_in_a_window_of_two_branches() -> None:
    model = nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
    optimizer = sgd(model)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)

    def step(x: Tensor, y: Tensor, i: int) -> Tensor:
        loss = heads(model, optimizer, x, y, i)
        plateau.step(loss)
        return loss

    run = quick(step, 2)
    run(*DATA[0], 0)
    loss = run(*DATA[1], 1)
    assert plateau.best == loss.item()
    assert (run.optimizer_step, run.pending) == (1, 0)


def test_a_number_for_a_scheduler() -> None:
    model = mlp()
    optimizer = sgd(model)
    warm = torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2)

    def step(x: Tensor, y: Tensor, epoch: float) -> None:
        plain_step(model, optimizer, x, y)
        warm.step(epoch)

    run = quick(step, 2)
    for i, batch in enumerate(DATA):
        run(*batch, i / 8)
    assert warm.T_cur == 7 / 8


def test_what_cannot_be_traced_is_an_error_of_ours() -> None:
    model = mlp()
    optimizer = sgd(model)
    average = AveragedModel(model)

    def step(x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x, y)
        average.update_parameters(model)

    refused(gradsync_fx.CaptureError, "graph break", quick(step, 2), *DATA[0])


def test_an_exception_of_the_steps_is_its_own() -> None:
    def step(x: Tensor) -> None:
        raise ValueError("bad batch")

    with pytest.raises(ValueError, match="bad batch"):
        quick(step, 2)(DATA[0][0])


def test_a_decorated_method_has_a_window_for_each_object() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model = mlp()
            self.optimizer = sgd(self.model)

        @gradsync_fx.optimize(gradient_accumulation_steps=2, backend="aot_eager")
        def step(self, x: Tensor, y: Tensor) -> Any:
            return plain_step(self.model, self.optimizer, x, y)

    first, second = Trainer(), Trainer()
    first.step(*DATA[0])
    second.step(*DATA[0])
    first.step(*DATA[1])
    assert (first.step.optimizer_step, second.step.optimizer_step) == (1, 0)
    assert second.step.pending == 1


def test_a_loss_after_the_update_in_a_window_that_closes_apart() -> None:
    """Known weights close a window at once; one of unknown weight cannot say what a later loss would be."""

    def step(x: Tensor, y: Tensor) -> Any:
        gradsync_fx.micro_batch_weight(x.shape[0])
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            return loss, mse(model, x, y)

    model = mlp()
    optimizer = sgd(model)
    run = quick(step, 1, reduction="weighted")
    loss, later = run(*DATA[0])
    assert torch.isfinite(loss)
    assert torch.isnan(later)


def test_a_buffer_that_forward_replaces_in_place() -> None:
    """`self.seen += n`: the tensor is also what the step hands back to the module."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += x.shape[0]
            return self.net(x)

    model = Counting()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    for batch in DATA[:3]:
        step(model, optimizer, *batch)
    step.flush()
    assert model.seen.item() == 12
    assert step.optimizer_step == 2


def test_an_average_that_the_step_replaces_in_place() -> None:
    """`average += ...` of updated weights: once for each update, untouched on the other calls."""

    class Averaged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 1)
            self.register_buffer("average", torch.zeros(1, 8))

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

    def step(x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x, y)
        with torch.no_grad():
            model.average += model.net.weight

    model = Averaged()
    optimizer = sgd(model)
    run = quick(step, 2)
    run(*DATA[0])
    assert float(model.average.abs().max()) == 0.0
    run(*DATA[1])
    assert torch.equal(model.average, model.net.weight)
    run(*DATA[2])
    before = model.average.clone()
    run.flush()
    assert torch.equal(model.average, before + model.net.weight)


@pytest.mark.parametrize("place", ["before", "after"])
def test_hyper_parameters_that_the_step_sets(place: str) -> None:
    def step(x: Tensor, y: Tensor, lr: float) -> None:
        if place == "before":
            optimizer.param_groups[0]["lr"] = lr
        plain_step(model, optimizer, x, y)
        if place == "after":
            optimizer.param_groups[0]["lr"] *= 0.5

    model = mlp()
    optimizer = sgd(model)
    error = refused(gradsync_fx.CaptureError, "group 0 of SGD", quick(step, 1), *DATA[0], 0.1)
    assert "drive.py" in error.culprit  # the line of optimizer.step()


class Odd(Optimizer):
    """A counter that is a Python int beside a state tensor that starts as ones."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                if "scale" not in state:
                    state["scale"] = torch.ones_like(p)
                state["scale"].mul_(0.9).add_(p.grad.abs())
                p.sub_(group["lr"] / state["n"] * p.grad / state["scale"])


def test_a_first_update_that_cannot_be_foreseen() -> None:
    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = Odd(model.parameters()), Odd(other.parameters())
    step = quick(plain_step, 1)
    for batch in DATA[:4]:
        step(model, optimizer, *batch)
        plain_step(other, theirs, *batch)
    assert {state["n"] for state in optimizer.state.values()} == {4}
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, its, atol=1e-6, rtol=0)
