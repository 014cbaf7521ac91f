"""Two models, two optimizers: under one loss, one after the other as in a GAN, each with a window of its own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync_fx
from tests.eagerly import programs
from tests.models import mlp
from tests.refusals import refused


def nets() -> tuple[nn.Module, nn.Module]:
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8))
    critic = nn.Sequential(nn.Linear(8, 8), nn.LeakyReLU(), nn.Linear(8, 1))
    return generator, critic


def adversarial(g: nn.Module, d: nn.Module, og: Any, od: Any, x: Tensor, z: Tensor) -> Any:
    """The discriminator's update, then the generator's, each zeroed before its backward."""
    od.zero_grad()
    fake = g(z)
    loss_d = F.softplus(-d(x)).mean() + F.softplus(d(fake.detach())).mean()
    loss_d.backward()
    od.step()
    og.zero_grad()
    loss_g = F.softplus(-d(fake)).mean()
    loss_g.backward()
    og.step()
    return loss_d, loss_g


def same_parameters(ours: Any, theirs: Any) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        for p, q in zip(mine.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(p, q, atol=1e-6, rtol=0)


class Sums:
    """Eager accumulation for one optimizer, by hand: nothing of one loss leaks into the other's gradients."""

    def __init__(self, model: nn.Module, optimizer: Any, k: int) -> None:
        self.parameters, self.optimizer, self.k = list(model.parameters()), optimizer, k
        self.sums = [torch.zeros_like(p) for p in self.parameters]
        self.calls = 0

    def add(self, loss: Tensor) -> None:
        self.calls += 1
        for total, grad in zip(self.sums, torch.autograd.grad(loss, self.parameters), strict=True):
            total += grad / self.k
        if self.calls % self.k == 0:
            self.update()

    def update(self, scale: float = 1.0) -> None:
        for p, total in zip(self.parameters, self.sums, strict=True):
            p.grad = total * scale
            total.zero_()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize(("kd", "kg"), [(1, 1), (3, 3), (1, 4), (2, 4), (3, 2)])
def test_a_gan_equals_the_eager_loop(kd: int, kg: int) -> None:
    """At its boundary the discriminator is updated before the generator's loss is computed, as in eager."""
    g, d = nets()
    g2, d2 = copy.deepcopy(g), copy.deepcopy(d)
    og, od, og2, od2 = (torch.optim.AdamW(m.parameters(), 1e-2) for m in (g, d, g2, d2))
    steps: Any = kd if kd == kg else {od: kd, og: kg}
    step = gradsync_fx.optimize(adversarial, gradient_accumulation_steps=steps, backend="aot_eager")
    of_d, of_g = Sums(d2, od2, kd), Sums(g2, og2, kg)
    updates = 0
    for n in range(1, 13):
        x, z = torch.randn(4, 8), torch.randn(4, 4)
        losses = step(g, d, og, od, x, z)
        fake = g2(z)
        loss_d = F.softplus(-d2(x)).mean() + F.softplus(d2(fake.detach())).mean()
        of_d.add(loss_d)
        loss_g = F.softplus(-d2(fake)).mean()
        of_g.add(loss_g)
        torch.testing.assert_close(losses, (loss_d.detach(), loss_g.detach()), atol=1e-5, rtol=0)
        closes = n % kd == 0 or n % kg == 0
        updates += closes
        assert step.sync_gradients is closes
        assert step.optimizer_step == updates
        same_parameters((g, d), (g2, d2))
    # One program for each set of optimizers that update together.
    sets = {(n % kd == 0, n % kg == 0) for n in range(1, 13)}
    assert step.compile_count == programs(len(sets))


def test_a_gradient_whose_only_call_closed_another_window() -> None:
    """The critic's second head trains in the first of two calls, which ends the trunk's window of one."""

    def step(nets: Any, ot: Any, oh: Any, x: Tensor, second: bool) -> Tensor:
        trunk, *heads = nets
        loss = F.softplus(trunk(x)).mean() + F.softplus(heads[second](x)).mean()
        loss.backward()
        ot.step()
        ot.zero_grad()
        oh.step()
        oh.zero_grad()
        return loss

    ours = nn.ModuleList(nn.Linear(4, 1) for _ in range(3))
    theirs = copy.deepcopy(ours)
    ot, oh = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (ours[0], ours[1:]))
    run = gradsync_fx.optimize(step, gradient_accumulation_steps={ot: 1, oh: 2}, backend="eager")
    trunk = torch.optim.SGD(theirs[0].parameters(), lr=0.1)
    heads = torch.optim.SGD(theirs[1:].parameters(), lr=0.1)
    for call, second in enumerate((True, False, False, False, False, True)):
        x = torch.randn(3, 4)
        run(ours, ot, oh, x, second)
        F.softplus(theirs[0](x)).mean().backward()
        (F.softplus(theirs[1 + second](x)).mean() / 2).backward()
        trunk.step()
        trunk.zero_grad()
        if call % 2:
            heads.step()
            heads.zero_grad()
            same_parameters([ours], [theirs])


def test_flush_closes_every_window() -> None:
    """After 5 calls: one micro-step pending with k = 2, two with k = 3."""
    g, d = nets()
    g2, d2 = copy.deepcopy(g), copy.deepcopy(d)
    og, od, og2, od2 = (torch.optim.SGD(m.parameters(), 0.1) for m in (g, d, g2, d2))
    step = gradsync_fx.optimize(
        adversarial, gradient_accumulation_steps={od: 2, og: 3}, backend="aot_eager"
    )
    of_d, of_g = Sums(d2, od2, 2), Sums(g2, og2, 3)
    for _ in range(5):
        x, z = torch.randn(4, 8), torch.randn(4, 4)
        step(g, d, og, od, x, z)
        fake = g2(z)
        of_d.add(F.softplus(-d2(x)).mean() + F.softplus(d2(fake.detach())).mean())
        of_g.add(F.softplus(-d2(fake)).mean())
    assert step.pending == 2
    step.flush()
    of_d.update(2.0)
    of_g.update(1.5)
    assert step.pending == 0
    same_parameters((g, d), (g2, d2))


@pytest.mark.captured
def test_a_clipping_over_both_cannot_have_two_windows() -> None:
    body, head = mlp(), nn.Linear(1, 1)
    ob, oh = torch.optim.SGD(body.parameters(), 0.1), torch.optim.SGD(head.parameters(), 0.1)

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(head(body(x)), y)
        loss.backward()
        nn.utils.clip_grad_norm_([*body.parameters(), *head.parameters()], 1.0)
        ob.step()
        oh.step()
        return loss

    step = gradsync_fx.optimize(both, gradient_accumulation_steps={ob: 1, oh: 2}, backend="eager")
    refused(gradsync_fx.CaptureError, "SGD", step, torch.randn(4, 8), torch.randn(4, 1))


@pytest.mark.captured
def test_an_optimizer_without_a_k() -> None:
    body, head = mlp(), nn.Linear(1, 1)
    ob, oh = torch.optim.SGD(body.parameters(), 0.1), torch.optim.AdamW(head.parameters(), 0.1)

    def both(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(head(body(x)), y)
        loss.backward()
        ob.step()
        oh.step()
        return loss

    step = gradsync_fx.optimize(both, gradient_accumulation_steps={ob: 2}, backend="eager")
    refused(gradsync_fx.OptionError, "parameter", step, torch.randn(4, 8), torch.randn(4, 1))


@pytest.mark.captured
def test_a_loss_of_noise_after_another_update_is_given_in_every_call() -> None:
    """The generator's, of noise that the step draws: made of the discriminator as it is."""
    torch.manual_seed(0)
    generator, critic = nn.Linear(2, 6), nn.Linear(6, 1)
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1) for m in (generator, critic))

    def step(x: Tensor) -> Tensor:
        made = generator(torch.randn(4, 2))
        (critic(made.detach()).mean() - critic(x).mean()).backward()
        theirs.step()
        theirs.zero_grad()
        loss = -critic(made).mean()
        loss.backward()
        ours.step()
        ours.zero_grad()
        theirs.zero_grad()
        return loss

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=2, backend="aot_eager")
    x = torch.ones(4, 6)
    torch.manual_seed(1)
    wanted = -critic(generator(torch.randn(4, 2))).mean().detach()
    torch.manual_seed(1)
    torch.testing.assert_close(run(x), wanted)
