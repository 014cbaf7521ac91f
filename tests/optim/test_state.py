"""The state of an optimizer before its first update, foreseen; and its update traced once for all values."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.optim.footprint import Footprint
from gradsync_fx.optim.reached import plain_step
from gradsync_fx.optim.state import initial_state
from gradsync_fx.optim.trace import trace_update


OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.5),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Muon": lambda p: torch.optim.Muon(p, lr=0.1),
}


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(6, 5)), nn.Parameter(torch.randn(5, 3))]


def give_gradients(params: list[nn.Parameter], seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    for p in params:
        p.grad = torch.randn(p.shape, generator=source)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_foreseen_state_leads_to_eagers_first_update(name: str) -> None:
    """A step from the foreseen state is, bit for bit, the step from nothing."""
    ours = parameters()
    theirs = copy.deepcopy(ours)
    optimizer, reference = OPTIMIZERS[name](ours), OPTIMIZERS[name](theirs)
    before = copy.deepcopy(optimizer.state_dict())
    found = initial_state(Footprint(optimizer), [0, 1])
    assert found is not None
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    assert after["state"].keys() == before["state"].keys()
    for i, state in before["state"].items():
        assert all(torch.equal(after["state"][i][key], value) for key, value in state.items())
    for i, state in found.items():
        if state:
            optimizer.state[ours[i]] = state
    give_gradients(ours, 1)
    give_gradients(theirs, 1)
    optimizer.step()
    reference.step()
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)
        for key, value in reference.state[other].items():
            held = optimizer.state[mine][key]
            assert torch.equal(held, value) if isinstance(value, torch.Tensor) else held == value


def test_a_state_that_exists_is_left_alone() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params)
    give_gradients(params, 1)
    optimizer.step()
    assert initial_state(Footprint(optimizer), [0, 1]) == {}


def test_a_state_that_cannot_be_foreseen_is_not_guessed() -> None:
    """Its first step keeps the gradient: no start gives that, and None says so."""

    class Keeps(Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for p in self.param_groups[0]["params"]:
                if p.grad is None:
                    continue
                old = self.state[p].get("kept")
                self.state[p]["kept"] = p.grad.clone() if old is None else old * 0.5 + p.grad * 0.3
                p.sub_(self.state[p]["kept"])

    assert initial_state(Footprint(Keeps(parameters())), [0, 1]) is None


def test_the_step_without_hooks_is_the_classs_own() -> None:
    optimizer = torch.optim.SGD(parameters(), lr=0.1)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 1.0)
    assert plain_step(optimizer).__qualname__ == "SGD.step"
    assert not hasattr(plain_step(optimizer), "hooked")


def state_of(optimizer: Optimizer) -> dict[int, Any]:
    flat = [p for group in optimizer.param_groups for p in group["params"]]
    return {i: dict(optimizer.state[p]) for i, p in enumerate(flat)}


def test_a_trace_fits_other_numbers_and_not_other_flags() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    give_gradients(params, 1)
    optimizer.step()
    state = state_of(optimizer)
    update = trace_update(optimizer, (0, 1), state, {})
    assert update.fits(update.read_numbers(state), state)

    optimizer.param_groups[0]["lr"] = 0.05
    optimizer.param_groups[0]["betas"] = (0.8, 0.99)
    assert update.fits(update.read_numbers(state), state)

    optimizer.param_groups[0]["maximize"] = True
    assert not update.fits(update.read_numbers(state), state)


def test_a_trace_notices_a_condition_that_turns() -> None:
    """`if weight_decay != 0` is a condition on a number: kept, and looked at before each update."""
    params = parameters()
    optimizer = torch.optim.SGD(params, lr=0.1, weight_decay=0.1)
    state: dict[int, Any] = {0: {}, 1: {}}
    update = trace_update(optimizer, (0, 1), state, {})
    optimizer.param_groups[0]["weight_decay"] = 0.2
    assert update.fits(update.read_numbers(state), state)
    optimizer.param_groups[0]["weight_decay"] = 0.0
    assert not update.fits(update.read_numbers(state), state)


def test_tracing_leaves_the_optimizer_as_it_was() -> None:
    params = parameters()
    optimizer = torch.optim.AdamW(params, lr=0.1)
    give_gradients(params, 1)
    optimizer.step()
    values = [p.detach().clone() for p in params]
    before = copy.deepcopy(optimizer.state_dict())
    trace_update(optimizer, (0, 1), state_of(optimizer), {})
    after = optimizer.state_dict()
    assert all(torch.equal(p, v) for p, v in zip(params, values, strict=True))
    assert after["param_groups"] == before["param_groups"]
    for i, state in before["state"].items():
        assert all(torch.equal(after["state"][i][key], value) for key, value in state.items())


class Lists(Optimizer):
    """A third-party optimizer whose `_init_group` is like torch's in name only: it returns what it found."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    def _init_group(self, params: list[Tensor]) -> list[Tensor]:
        return [p for p in params if p.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in self._init_group(group["params"]):
                state = self.state[p]
                if "average" not in state:
                    state["average"] = torch.zeros_like(p)
                state["average"].mul_(0.9).add_(p.grad)
                p.add_(state["average"], alpha=-group["lr"])


class Keywords(Lists):
    """One that takes a list by keyword, and further ones."""

    def _init_group(self, params: list[Tensor], *, into: Any = None, **more: Any) -> list[Tensor]:  # type: ignore[override]
        found = super()._init_group(params)
        if into is not None:
            into.extend(found)
        return found


@pytest.mark.parametrize("kind", [Lists, Keywords])
def test_another_librarys_init_group_is_not_called_as_torchs(kind: type[Lists]) -> None:
    model = nn.Linear(3, 1)
    twin = copy.deepcopy(model)
    optimizer, reference = kind(model.parameters()), kind(twin.parameters())

    def step(x: Tensor) -> None:
        model(x).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend="aot_eager")
    source = torch.Generator().manual_seed(0)
    for number in range(4):
        x = torch.randn(4, 3, generator=source)
        run(x)
        (twin(x).pow(2).mean() / 2).backward()
        if number % 2:
            reference.step()
            reference.zero_grad()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    assert run.compile_count == 2
