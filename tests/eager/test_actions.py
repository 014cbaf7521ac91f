"""State that an eager step keeps beside its optimizer, in place: with the update, also where a flush makes that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import gradsync_fx


K, CALLS = 2, 2 * 2 + 1


class Kept:
    """A model with statistics of its own, its average, momentum by hand and a factor that decays."""

    def __init__(self, multi: bool = False) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3), nn.Linear(3, 3))
        self.optimizer = torch.optim.SGD(self.net.parameters(), 0.5)
        how: dict[str, Any] = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if multi else {}
        self.average = AveragedModel(self.net, **how)
        self.momentum = [torch.zeros_like(p) for p in self.net.parameters()]
        self.factor = torch.ones(())

    def observed(self) -> list[Tensor]:
        held = [*self.net.parameters(), *self.average.parameters(), *self.average.buffers()]
        return [t.detach().clone() for t in (*held, *self.momentum, self.factor)]


def averaged(of: Kept) -> None:
    of.optimizer.step()
    of.average.update_parameters(of.net)


def momentum_by_hand(of: Kept) -> None:
    for held, p in zip(of.momentum, of.net.parameters(), strict=True):
        held.mul_(0.9).add_(p.grad)
        p.grad.copy_(held)  # type: ignore[union-attr]
    of.optimizer.step()


def momentum_of_all(of: Kept) -> None:
    gradients = [p.grad for p in of.net.parameters()]
    torch._foreach_mul_(of.momentum, 0.9)
    torch._foreach_add_(of.momentum, gradients)  # type: ignore[arg-type]
    torch._foreach_copy_(gradients, of.momentum)  # type: ignore[arg-type]
    of.optimizer.step()


def decaying_factor(of: Kept) -> None:
    of.factor.mul_(0.9)
    for p in of.net.parameters():
        p.grad.mul_(of.factor)  # type: ignore[union-attr]
    of.optimizer.step()


@pytest.mark.parametrize("multi", [False, True], ids=["mean", "moving"])
@pytest.mark.parametrize(
    "update",
    [averaged, momentum_by_hand, momentum_of_all, decaying_factor],
    ids=lambda f: f.__name__,
)
def test_with_the_update(update: Callable[[Kept], None], multi: bool) -> None:
    ours, plain = Kept(multi), Kept(multi)
    generator = torch.Generator().manual_seed(1)
    data = [
        (torch.randn(4, 6, generator=generator), torch.randn(4, 3, generator=generator))
        for _ in range(CALLS)
    ]

    def train_step(x: Tensor, y: Tensor) -> None:
        loss = F.mse_loss(ours.net(x), y)
        loss.backward()
        if float(loss.detach()) > 1e9:
            raise AssertionError("a branch on a value: no program holds it")
        update(ours)
        ours.optimizer.zero_grad()

    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=K, backend="aot_eager", on_unsupported="eager"
    )
    with pytest.warns(gradsync_fx.GradSyncWarning, match="runs eagerly"):
        step(*data[0])
    for x, y in data[1:]:
        step(x, y)
    step.flush()
    for number, (x, y) in enumerate(data, 1):
        (F.mse_loss(plain.net(x), y) / (1 if number == CALLS else K)).backward()
        if number % K == 0 or number == CALLS:
            update(plain)
            plain.optimizer.zero_grad()
    for held, wanted in zip(ours.observed(), plain.observed(), strict=True):
        torch.testing.assert_close(held, wanted)
