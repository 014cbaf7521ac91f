"""One rank: a window of an optimized step is what eager accumulation, and the joined batch, make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr
from torch.utils import _pytree as pytree

from tests.drive import drive, plain_step, quick, step_of
from tests.models import Convnet, Lin, TinyGPT, matrices, mlp
from tests.reference import (
    Window,
    accumulation,
    assert_same,
    assert_same_tensors,
    joined,
    mse,
    regression,
    twins,
)


Parameters = Iterable[nn.Parameter]


class Counting(Optimizer):
    """Momentum with a warm-up: a user's own optimizer, its counter a Python int, its state made in `step`."""

    def __init__(self, params: Parameters, lr: float = 0.1, warmup: int = 3) -> None:
        super().__init__(params, {"lr": lr, "warmup": warmup})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["average"] = torch.zeros_like(p)
                state["step"] += 1
                state["average"].mul_(0.9).add_(p.grad, alpha=0.1)
                rate = group["lr"] * min(1.0, state["step"] / group["warmup"])
                p.add_(state["average"] / (1 - 0.9 ** state["step"]), alpha=-rate)


class GroupCounting(Optimizer):
    """A user's own optimizer whose rate falls with a Python int in the parameter group."""

    def __init__(self, params: Parameters, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "updates": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["updates"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["updates"])


OPTIMIZERS: dict[str, Callable[[Parameters], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "dampening": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "maximize": lambda p: torch.optim.SGD(p, lr=0.01, maximize=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-3),
    "Adam-l2": lambda p: torch.optim.Adam(p, lr=1e-3, weight_decay=0.1),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=1e-3, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-3),
    "AdamW-foreach": lambda p: torch.optim.AdamW(p, lr=1e-3, foreach=True),
    "AdamW-fused": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
    "AdamW-lr-tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-3)),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
    "RMSprop-centered": lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.5),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-3),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "own": Counting,
    "own-group": GroupCounting,
}


def sgd(model: nn.Module, rate: float = 0.1) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


# The window


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_lin_is_exact(k: int) -> None:
    """w - mean(x) after each window, w itself times x as the loss: integers, to the last bit."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), k)
    wanted = torch.zeros(())
    number = 0
    for _ in range(6):
        total = 0
        for i in range(k):
            number = (number * 7 + 3) % 23
            loss = step(model, optimizer, torch.tensor(float(number)))
            assert loss.item() == (wanted * number).item()
            total += number
            assert step.sync_gradients is (i + 1 == k)
            if i + 1 < k:
                assert model.w.item() == wanted.item()
        wanted = wanted - torch.tensor(float(total)) / k
        assert model.w.item() == wanted.item()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_boundary_is_every_kth_call(k: int) -> None:
    model = Lin()
    optimizer = sgd(model)
    step = quick(step_of(lambda model, x: model(x)), k)
    closed = []
    for _ in range(3 * k):
        step(model, optimizer, torch.tensor(1.0))
        closed.append(step.sync_gradients)
    assert closed == ([False] * (k - 1) + [True]) * 3


def test_no_micro_step_is_lost() -> None:
    """x = 1, 2, 4 and k = 3: 7/3, not the last alone."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 3)
    for x in (1.0, 2.0, 4.0):
        step(model, optimizer, torch.tensor(x))
    assert model.w.item() == -(torch.tensor(7.0) / 3).item()


def test_sum_reduction_is_exact() -> None:
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 3, reduction="sum")
    for x in (1.0, 2.0, 4.0):
        step(model, optimizer, torch.tensor(x))
    assert model.w.item() == -7.0


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_sgd_equals_the_joined_batch(k: int) -> None:
    """The first window apart: 1e-6 after one update. Five more follow it."""
    ours, eager, whole = twins(mlp(), 3)
    data = regression(6, k)
    mine = drive(quick(plain_step, k), ours, sgd(ours), data)
    theirs = accumulation(eager, sgd(eager), data)
    batch = joined(whole, sgd(whole), [data])
    for name, tensor in mine.updates[0].items():
        torch.testing.assert_close(tensor, batch.updates[0][name], atol=1e-6, rtol=0)
        torch.testing.assert_close(tensor, theirs.updates[0][name], atol=1e-6, rtol=0)
    assert_same(mine, theirs, atol=1e-6)
    assert_same_tensors(mine, batch, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_adamw_after_20_updates(k: int) -> None:
    ours, eager, whole = twins(mlp(), 3)
    data = regression(20, k)

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = quick(plain_step, k)
    mine = drive(step, ours, make(ours), data)
    assert_same(mine, accumulation(eager, make(eager), data), atol=1e-5)
    batch = joined(whole, make(whole), [data])
    assert_same_tensors(mine, batch, atol=1e-5)
    assert step.compile_count == min(k, 2)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(name: str) -> None:
    """Six updates: parameters, losses, and the optimizer's own state_dict. Two programs, the first call included."""
    ours, eager = twins(mlp())
    data = regression(6, 2)
    optimizer, reference = OPTIMIZERS[name](ours.parameters()), OPTIMIZERS[name](eager.parameters())
    step = quick(plain_step, 2)
    mine = drive(step, ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=2e-6)
    same_state(optimizer.state_dict(), reference.state_dict())
    # With dampening, SGD's first update is other arithmetic than later ones: a program of its own.
    assert step.compile_count == (3 if name == "dampening" else 2)


def test_muon() -> None:
    """Its orthogonalisation runs in bfloat16, where another order of the sums shows early."""
    ours, eager = twins(matrices())
    data = regression(6, 2)
    optimizer = torch.optim.Muon(ours.parameters(), lr=1e-3)
    reference = torch.optim.Muon(eager.parameters(), lr=1e-3)
    step = quick(plain_step, 2)
    mine = drive(step, ours, optimizer, data)
    theirs = accumulation(eager, reference, data)
    assert_same(mine, theirs, atol=1e-4)
    moved = (theirs.updates[-1]["0.weight"] - theirs.updates[0]["0.weight"]).abs().max()
    assert moved > 1e-3
    assert step.compile_count == 2


def same_state(ours: dict[str, Any], theirs: dict[str, Any], atol: float = 2e-6) -> None:
    """Two state dicts of one optimizer class: the same keys, types, and values within `atol`."""
    assert ours["state"].keys() == theirs["state"].keys()
    assert len(ours["param_groups"]) == len(theirs["param_groups"])
    pairs = [(ours["state"][i], theirs["state"][i]) for i in theirs["state"]]
    for mine, other in [*pairs, *zip(ours["param_groups"], theirs["param_groups"], strict=True)]:
        assert mine.keys() == other.keys()
        for key, value in other.items():
            assert type(mine[key]) is type(value), key
            if isinstance(value, Tensor):
                assert mine[key].dtype is value.dtype
                torch.testing.assert_close(mine[key], value, atol=atol, rtol=1e-5)
            elif isinstance(value, float):
                assert mine[key] == pytest.approx(value, rel=1e-6)
            else:
                assert mine[key] == value, key


def test_optimizer_state_appears_with_the_first_update() -> None:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = quick(plain_step, 2)
    (window,) = regression(1, 2)
    step(model, optimizer, *window[0])
    assert optimizer.state_dict()["state"] == {}
    step(model, optimizer, *window[1])
    assert {int(s["step"]) for s in optimizer.state.values()} == {1}


def test_a_loaded_optimizer_goes_on() -> None:
    """An optimizer that has run in eager before, and one that a state dict was loaded into."""
    ours, eager = twins(mlp())
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    data = regression(6, 2)
    accumulation(ours, optimizer, data[:2])
    accumulation(eager, reference, data[:2])
    step = quick(plain_step, 2)
    assert_same(
        drive(step, ours, optimizer, data[2:4]),
        accumulation(eager, reference, data[2:4]),
        atol=2e-6,
    )
    optimizer.load_state_dict(optimizer.state_dict())
    reference.load_state_dict(reference.state_dict())
    assert_same(
        drive(step, ours, optimizer, data[4:]), accumulation(eager, reference, data[4:]), atol=2e-6
    )
    assert step.compile_count == 2


# Schedules and numbers that move


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
    assert step.compile_count == 2
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
    assert step.compile_count == 2
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
    assert step.compile_count == 2


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
    assert step.compile_count == 2


def test_another_batch_size_is_another_capture_in_the_same_window() -> None:
    ours, eager = twins(mlp())
    data = regression(1, 1, batch=4)[0] + regression(1, 1, batch=6)[0]
    windows = [data, data, data]
    mine = drive(quick(plain_step, 2), ours, sgd(ours), windows)
    assert_same(mine, accumulation(eager, sgd(eager), windows), atol=1e-6)


def test_parameter_groups() -> None:
    """Rates, decay and momentum differ; one group has no parameter that the loss reaches."""
    ours, eager = twins(mlp())
    unused, other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def make(model: nn.Module, extra: nn.Parameter) -> Optimizer:
        model.register_parameter("extra", extra)
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.05},  # type: ignore[index]
            {"params": list(model[2].parameters()), "weight_decay": 0.1},  # type: ignore[index]
            {"params": [extra]},
        ]
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    data = regression(5, 2)
    optimizer, reference = make(ours, unused), make(eager, other)
    mine = drive(quick(plain_step, 2), ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-6)
    same_state(optimizer.state_dict(), reference.state_dict())
    assert torch.equal(unused, torch.ones(2))


def test_two_optimizers_in_one_step() -> None:
    ours, eager = twins(mlp())
    data = regression(5, 2)

    def make(model: nn.Module) -> list[Optimizer]:
        return [
            torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9),  # type: ignore[index]
            torch.optim.AdamW(model[2].parameters(), lr=1e-2),  # type: ignore[index]
        ]

    def two(model: nn.Module, optimizers: list[Optimizer], x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    mine = make(ours)
    step = quick(two, 2)
    for window in data:
        for x, y in window:
            step(ours, mine, x, y)
    first, second = make(eager)
    for window in data:
        for x, y in window:
            (mse(eager, x, y) / 2).backward()
        first.step()
        second.step()
        eager.zero_grad()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


# The form of the step


def clip_norm(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=False)


def clip_norm_foreach(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1, foreach=True)


def clip_value(model: nn.Module) -> object:
    return torch.nn.utils.clip_grad_value_(model.parameters(), 0.02)


@pytest.mark.parametrize("clip", [clip_norm, clip_norm_foreach, clip_value])
def test_clipping_is_of_the_window(clip: Callable[[nn.Module], object]) -> None:
    def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        clip(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    ours, eager, free = twins(mlp(), 3)
    data = regression(5, 3)
    mine = drive(quick(clipped, 3), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data, before=lambda: clip(eager)), atol=1e-6)
    unclipped = accumulation(free, sgd(free), data).updates[0]["0.weight"]
    assert not torch.allclose(mine.updates[0]["0.weight"], unclipped, atol=1e-4)


def test_a_clipped_norm_is_nan_until_the_boundary() -> None:
    def normed(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = mse(model, x, y)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(normed, 2)
    for window in regression(5, 2):
        norms = [step(ours, optimizer, *batch)[1] for batch in window]
        for batch in window:
            (mse(eager, *batch) / 2).backward()
        wanted = torch.nn.utils.clip_grad_norm_(eager.parameters(), 0.1)
        reference.step()
        reference.zero_grad()
        assert norms[0].isnan()
        torch.testing.assert_close(norms[1], wanted, atol=1e-6, rtol=1e-5)


ZERO: dict[str, Callable[[nn.Module, Optimizer], object]] = {
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "optimizer-set": lambda model, optimizer: optimizer.zero_grad(set_to_none=True),
    "optimizer-zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "module": lambda model, optimizer: model.zero_grad(),
    "module-zeros": lambda model, optimizer: model.zero_grad(set_to_none=False),
    "never": lambda model, optimizer: None,
}


@pytest.mark.parametrize("place", ["top", "end"])
@pytest.mark.parametrize("how", ZERO)
def test_zeroing(how: str, place: str) -> None:
    """Zeroing is part of the update, wherever it stands in the step and however it is written."""
    zero = ZERO[how]

    def step_with_zeroing(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        if place == "top":
            zero(model, optimizer)
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        if place == "end":
            zero(model, optimizer)
        return loss

    ours, eager = twins(mlp())
    data = regression(5, 2)
    mine = drive(quick(step_with_zeroing, 2), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data), atol=1e-6)


RETURNS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "loss": lambda loss, out: loss,
    "item of a tuple": lambda loss, out: (loss, out),
    "list": lambda loss, out: [out, loss],
    "dict": lambda loss, out: {"loss": loss, "nested": {"out": out}, "name": "fit", "count": 3},
    "nothing": lambda loss, out: None,
}


def assert_same_values(found: Any, wanted: Any) -> None:
    """Tensors close, all else equal, the structure the same."""
    mine, structure = pytree.tree_flatten(found)
    theirs, other = pytree.tree_flatten(wanted)
    assert structure == other
    for a, b in zip(mine, theirs, strict=True):
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)
        else:
            assert a == b
            assert type(a) is type(b)


@pytest.mark.parametrize("name", RETURNS)
def test_what_the_step_returns(name: str) -> None:
    give = RETURNS[name]

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        loss = F.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return give(loss, out)

    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    run = quick(step, 2)
    for window in regression(5, 2):
        for x, y in window:
            found = run(ours, optimizer, x, y)
            out = eager(x)
            loss = F.mse_loss(out, y)
            (loss / 2).backward()
            wanted = give(loss.detach(), out.detach())
            assert type(found) is type(wanted)
            assert_same_values(found, wanted)
        reference.step()
        reference.zero_grad()
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def check_against_eager(
    run: Callable[[Tensor, Tensor], Any], ours: nn.Module, eager: nn.Module
) -> None:
    """`run(x, y)` is a micro-step of a window of two, SGD at 0.1."""
    data = regression(5, 2)
    for window in data:
        for x, y in window:
            run(x, y)
    accumulation(eager, sgd(eager), data)
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_model_and_optimizer_in_a_closure() -> None:
    ours, eager = twins(mlp())
    optimizer = sgd(ours)

    def step(x: Tensor, y: Tensor) -> Tensor:
        return plain_step(ours, optimizer, x, y)

    check_against_eager(quick(step, 2), ours, eager)


global_model: nn.Module = nn.Identity()
global_optimizer: Optimizer = torch.optim.SGD([torch.zeros(1)])


def global_step(x: Tensor, y: Tensor) -> Tensor:
    return plain_step(global_model, global_optimizer, x, y)


def test_model_and_optimizer_as_globals(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, eager = twins(mlp())
    monkeypatch.setitem(globals(), "global_model", ours)
    monkeypatch.setitem(globals(), "global_optimizer", sgd(ours))
    check_against_eager(quick(global_step, 2), ours, eager)


class Trainer:
    """Holds model and optimizer; its method is the step."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.optimizer = model, sgd(model)
        self.run = quick(self.step, 2)

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(self.model, x, y)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


def test_the_step_is_a_method() -> None:
    ours, eager = twins(mlp())
    check_against_eager(Trainer(ours).run, ours, eager)


def test_keyword_arguments() -> None:
    ours, eager = twins(mlp())
    optimizer = sgd(ours)
    step = quick(plain_step, 2)
    check_against_eager(lambda a, b: step(ours, y=b, x=a, optimizer=optimizer), ours, eager)


def test_gradients_by_autograd_grad() -> None:
    """Parameters that are written by hand, without an `Optimizer`."""

    def step(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.sub_(0.1 * p.grad)
                p.grad = None
        return loss

    ours, eager = twins(mlp())
    run = quick(step, 2)
    check_against_eager(lambda x, y: run(ours, x, y), ours, eager)


def test_two_backwards_on_one_forward() -> None:
    """w * 1 and w * 2: each micro-step adds 3."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        out = model(x)
        first, second = out * 1, out * 2
        first.backward(retain_graph=True)
        second.backward()
        optimizer.step()
        optimizer.zero_grad()
        return first + second

    model = Lin()
    optimizer = sgd(model, 1.0)
    run = quick(step, 2)
    for window in range(1, 6):
        for _ in range(2):
            run(model, optimizer, torch.tensor(1.0))
        assert model.w.item() == -3.0 * window


def test_three_forwards_then_three_backwards() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        losses = [mse(model, x * scale, y) for scale in (1.0, 2.0, 3.0)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses[0].detach()

    def total(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        return mse(model, x, y) + mse(model, x * 2.0, y) + mse(model, x * 3.0, y)

    ours, eager = twins(mlp())
    data = regression(5, 2)
    mine = drive(quick(step, 2), ours, sgd(ours, 0.01), data)
    theirs = accumulation(eager, sgd(eager, 0.01), data, total)
    assert_same_tensors(mine, theirs, atol=1e-6)


def test_sharpness_aware_step_without_accumulation() -> None:
    """Reads its gradient, moves, and runs a second backward: with k = 1 nothing is deferred, and it runs."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        with torch.no_grad():
            moves = [0.05 * p.grad for p in model.parameters() if p.grad is not None]
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        mse(model, x, y).backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    run = quick(step, 1)
    for window in regression(5, 1):
        run(ours, optimizer, *window[0])
        step(eager, reference, *window[0])
        for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_gradients_zeroed_between_two_backwards_count_once() -> None:
    """The first backward is thrown away: only the second reaches the update."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
        out = model(x)
        (3 * out).backward(retain_graph=True)
        optimizer.zero_grad()
        out.backward()
        optimizer.step()
        return out

    model = Lin()
    optimizer = sgd(model, 1.0)
    run = quick(step, 2)
    for x in (2.0, 4.0):
        run(model, optimizer, torch.tensor(x))
    assert model.w.item() == -3.0


def test_train_and_eval_mode_share_a_window() -> None:
    """Another mode of the model is another capture; the window, and the sums, go on."""
    ours, eager = twins(Convnet(dropout=0.5))
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(step_of(classification), 2)
    torch.manual_seed(3)
    for window in images(4, 2):
        for training, batch in zip((True, False), window, strict=True):
            step(ours.train(training), optimizer, *batch)
    torch.manual_seed(3)
    for window in images(4, 2):
        for training, batch in zip((True, False), window, strict=True):
            (classification(eager.train(training), *batch) / 2).backward()
        reference.step()
        reference.zero_grad()
    for name, tensor in ours.state_dict().items():
        torch.testing.assert_close(tensor, eager.state_dict()[name], atol=1e-6, rtol=0)


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


def test_low_precision_parameters_are_summed_in_float32() -> None:
    """256 + 1 + 1 is 256 in bfloat16, 258 when the running sum is float32."""
    model = Lin().to(torch.bfloat16)
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 3, reduction="sum")
    for x in (256.0, 1.0, 1.0):
        step(model, optimizer, torch.tensor(x, dtype=torch.bfloat16))
    assert model.w.item() == -258.0


# State beside parameters


def test_average_of_the_weights_and_a_counter_of_samples() -> None:
    """The average depends on the update: once a window. The counter does not: every call."""
    ours, eager = twins(mlp())
    seen = torch.zeros((), dtype=torch.int64)
    optimizer, reference = sgd(ours), sgd(eager)

    def blend(average: nn.Module, model: nn.Module) -> None:
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.25)

    average, wanted = twins(mlp())
    average.load_state_dict(ours.state_dict())
    wanted.load_state_dict(ours.state_dict())

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = mse(ours, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        blend(average, ours)
        seen.add_(x.shape[0])
        return loss

    run = quick(step, 2)
    for n, window in enumerate(regression(5, 2), 1):
        for batch in window:
            run(*batch)
            (mse(eager, *batch) / 2).backward()
        reference.step()
        reference.zero_grad()
        blend(wanted, eager)
        assert seen.item() == 8 * n
        for a, b in zip(average.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def images(windows: int, k: int) -> list[Window]:
    source = torch.Generator().manual_seed(3)
    return [
        [
            (
                torch.randn(4, 1, 8, 8, generator=source),
                torch.randint(10, (4,), generator=source),
            )
            for _ in range(k)
        ]
        for _ in range(windows)
    ]


def classification(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def test_batch_statistics_equal_eager_accumulation() -> None:
    ours, eager = twins(Convnet())
    data = images(5, 3)
    mine = drive(quick(step_of(classification), 3), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data, classification), atol=1e-6)
    assert mine.updates[-1]["norm.num_batches_tracked"] == 15


def test_dropout_has_eagers_masks() -> None:
    ours, eager = twins(Convnet(dropout=0.5))
    data = images(5, 3)
    torch.manual_seed(11)
    mine = drive(quick(step_of(classification), 3), ours, sgd(ours), data)
    torch.manual_seed(11)
    theirs = accumulation(eager, sgd(eager), data, classification)
    assert_same(mine, theirs, atol=1e-6)


def test_dropout_masks_differ_between_micro_steps() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Any:
        kept = F.dropout(x, 0.5)
        loss = model(kept).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss, kept

    model = Lin()
    optimizer = sgd(model)
    run = quick(step, 3)
    masks = [run(model, optimizer, torch.ones(64))[1] for _ in range(6)]
    assert all(not torch.equal(a, b) for i, a in enumerate(masks) for b in masks[:i])


def tokens(windows: int, k: int) -> list[Window]:
    source = torch.Generator().manual_seed(5)
    return [
        [(torch.randint(17, (2, 9), generator=source),) for _ in range(k)] for _ in range(windows)
    ]


def next_token(model: nn.Module, text: Tensor) -> Tensor:
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def test_gpt_with_tied_weights() -> None:
    """SGD: the gradient of attention's key bias is zero but for rounding, and Adam would blow the rounding up."""
    ours, eager = twins(TinyGPT())
    data = tokens(5, 3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    step = quick(step_of(next_token), 3)
    mine = drive(step, ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data, next_token), atol=1e-5)
    assert step.gradients().keys() == {name for name, _ in ours.named_parameters()}
    assert all(
        not torch.equal(mine.updates[0][name], mine.updates[1][name]) for name in step.gradients()
    )


def test_a_parameter_without_gradient_keeps_its_value() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.frozen, self.unused = mlp(), nn.Linear(8, 8), nn.Linear(2, 2)
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(self.frozen(x))

    ours, eager = twins(Half())
    data = regression(5, 2)
    step = quick(plain_step, 2)
    mine = drive(step, ours, torch.optim.AdamW(ours.parameters()), data)
    theirs = accumulation(eager, torch.optim.AdamW(eager.parameters()), data)
    assert_same(mine, theirs, atol=1e-5)
    assert all(name.startswith("used.") for name in step.gradients())


def test_evaluation_inside_a_window_changes_nothing() -> None:
    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(plain_step, 4)
    (window,) = regression(1, 4)
    for i, batch in enumerate(window):
        step(ours, optimizer, *batch)
        if i == 1:
            before = {name: t.clone() for name, t in step.gradients().items()}
            ours.eval()
            with torch.no_grad():
                ours(torch.randn(7, 8))
            ours.train()
            assert all(torch.equal(t, before[name]) for name, t in step.gradients().items())
            assert step.pending == 2
    accumulation(eager, reference, [window])
    for a, b in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_gradients_show_the_running_sum() -> None:
    model = Lin()
    optimizer = sgd(model)
    step = quick(step_of(lambda model, x: model(x)), 3)
    step(model, optimizer, torch.tensor(2.0))
    step(model, optimizer, torch.tensor(5.0))
    assert step.gradients()["w"].item() == 7.0
    step(model, optimizer, torch.tensor(1.0))
    assert step.gradients()["w"].item() == 0.0


def test_many_steps_in_one_process() -> None:
    """More optimized steps than torch allows captures of one function: they do not share that limit."""
    for n in range(1, 20):
        model = Lin()
        optimizer = sgd(model, 1.0)
        step = quick(step_of(lambda model, x: model(x)), 1)
        step(model, optimizer, torch.tensor(float(n)))
        assert model.w.item() == -n


@pytest.mark.inductor
def test_inductor_computes_the_same() -> None:
    ours, eager = twins(mlp())
    data = regression(5, 2)
    step = quick(plain_step, 2, backend="inductor")
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    mine = drive(step, ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-5)
    assert step.compile_count == 2


@pytest.mark.parametrize("backend", ["eager", lambda module, inputs: module.forward])
def test_other_backends_compute_the_same(backend: Any) -> None:
    ours, eager = twins(mlp())
    data = regression(5, 2)
    mine = drive(quick(plain_step, 2, backend=backend), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data), atol=1e-6)
