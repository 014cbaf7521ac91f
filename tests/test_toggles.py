"""`requires_grad` toggled inside a step, as image-to-image GANs do: refused when captured, right in an eager run."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from tests.drive import quick
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        yield


def freeze(net: nn.Module, on: bool) -> None:
    for p in net.parameters():
        p.requires_grad = not on


def by_helper(net: nn.Module, on: bool) -> None:
    freeze(net, on)


def by_method(net: nn.Module, on: bool) -> None:
    net.requires_grad_(not on)


def by_tensor(net: nn.Module, on: bool) -> None:
    for p in net.parameters():
        p.requires_grad_(not on)


Toggle = Callable[[nn.Module, bool], None]
TOGGLES = [by_helper, by_method, by_tensor]


class Pair:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.generator, self.critic = nn.Linear(3, 3), nn.Linear(3, 1)
        self.first = torch.optim.SGD(self.generator.parameters(), lr=0.1)
        self.second = torch.optim.SGD(self.critic.parameters(), lr=0.1)

    def losses(self, toggle: Toggle, x: Tensor, scale: float = 1.0) -> None:
        """The critic first, then the generator, through a critic that is frozen until the next call."""
        toggle(self.critic, False)
        (scale * (self.critic(x) ** 2).mean()).backward()
        toggle(self.critic, True)
        (scale * self.critic(self.generator(x)).mean()).backward()

    def update(self) -> None:
        for optimizer in (self.first, self.second):
            optimizer.step()
            optimizer.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        return [*self.generator.parameters(), *self.critic.parameters()]


def step_of(toggle: Toggle) -> Callable[..., None]:
    def step(pair: Pair, x: Tensor, update: bool = True) -> None:
        pair.losses(toggle, x)
        if update:
            pair.first.step()
            pair.second.step()
            pair.first.zero_grad()
            pair.second.zero_grad()

    return step


def data(calls: int) -> list[Tensor]:
    return list(torch.randn(calls, 4, 3, generator=torch.Generator().manual_seed(1)))


def reference(windows: list[list[Tensor]]) -> list[nn.Parameter]:
    pair = Pair()
    for window in windows:
        for x in window:
            pair.losses(by_tensor, x, 1 / len(window))
        pair.update()
    return pair.parameters()


def same(pair: Pair, windows: list[list[Tensor]]) -> None:
    for mine, its in zip(pair.parameters(), reference(windows), strict=True):
        torch.testing.assert_close(mine.detach(), its.detach(), atol=1e-6, rtol=0)


@pytest.mark.parametrize("toggle", TOGGLES)
def test_captured_it_is_refused_with_its_line(toggle: Toggle) -> None:
    pair = Pair()
    before = copy.deepcopy(pair.parameters())
    step = quick(step_of(toggle), 2)
    error = refused(gradsync_fx.CaptureError, "test_toggles.py:", step, pair, data(1)[0])
    assert 'on_unsupported="eager"' in error.fix
    assert all(map(torch.equal, before, pair.parameters()))
    assert all(p.requires_grad for p in pair.parameters())


@pytest.mark.parametrize("toggle", TOGGLES)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_eager_run_goes_by_it(toggle: Toggle, k: int) -> None:
    """Five calls: whole windows, and the rest at a flush."""
    pair, xs = Pair(), data(5)
    step = quick(step_of(toggle), k, on_unsupported="eager")
    for x in xs:
        step(pair, x)
    step.flush()
    same(pair, [xs[i : i + k] for i in range(0, 5, k)])


@pytest.mark.parametrize("toggle", TOGGLES)
def test_a_step_that_closes_its_windows_itself(toggle: Toggle) -> None:
    pair, xs = Pair(), data(5)
    step = gradsync_fx.optimize(
        step_of(toggle),
        gradient_accumulation_steps="manual",
        on_unsupported="eager",
        backend="aot_eager",
    )
    for i, x in enumerate(xs):
        step(pair, x, i % 2 == 1)
    step.flush()
    same(pair, [xs[:2], xs[2:4], xs[4:]])


def test_a_toggle_between_calls_of_a_window_is_still_refused() -> None:
    pair, xs = Pair(), data(2)
    step = quick(step_of(by_method), 2, on_unsupported="eager")
    step(pair, xs[0])
    pair.generator.requires_grad_(False)
    refused(gradsync_fx.WindowError, "requires_grad of", step, pair, xs[1])


def test_a_toggle_that_changes_nothing_is_captured() -> None:
    def step(pair: Pair, x: Tensor) -> None:
        pair.critic.requires_grad_(True)
        (pair.critic(x) ** 2).mean().backward()
        pair.second.step()
        pair.second.zero_grad()

    pair = Pair()
    run = quick(step, 2)
    for x in data(2):
        run(pair, x)
    assert run.compile_count == 2
