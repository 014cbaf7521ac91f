"""The check that users run: equal on right steps, not equal where a program is wrong, and no traces left."""

from __future__ import annotations

import copy
import random
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.errors import VerificationError, WindowError
from tests import trained_elsewhere
from tests.drive import plain_step, quick
from tests.models import Convnet, TinyGPT, mlp
from tests.optimizers import OPTIMIZERS, adamw, sgd
from tests.refusals import refused
from tests.scenarios import checked
from tests.workers import Ranks


def batch(rows: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, 8), torch.randn(rows, 1)


@pytest.mark.parametrize("optimizer", ["momentum", "AdamW", "own"])
def test_a_right_step_is_equal(optimizer: str) -> None:
    model = mlp()
    step = quick(plain_step, 3)
    verdict = step.self_check(model, OPTIMIZERS[optimizer](model.parameters()), *batch())
    assert verdict, str(verdict)
    assert "one window of 3 micro-steps on 1 rank" in str(verdict)
    kinds = {value.what for value in verdict.values}
    assert {"parameter", "output", "optimizer state"} <= kinds
    assert max(v.difference for v in verdict.values if v.what == "parameter") < 1e-6


def classified(model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor) -> Any:
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    scheduler.step()
    return loss, norm


def test_dropout_statistics_clipping_and_a_scheduler() -> None:
    """A bias before BatchNorm has a gradient of noise alone, which Adam makes steps of full size from."""
    model = Convnet(dropout=0.5)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = quick(classified, 2)
    images, classes = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
    verdict = step.self_check(model, optimizer, scheduler, images, classes)
    assert verdict, str(verdict)
    assert scheduler.get_last_lr() == [1e-3]


def test_tied_weights_and_attention() -> None:
    model = TinyGPT()
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    tokens = torch.randint(17, (3, 8))
    verdict = quick(classified, 2).self_check(model, optimizer, scheduler, tokens, tokens)
    assert verdict, str(verdict)


def weighed(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    loss = plain_step(model, optimizer, x, y)
    gradsync_fx.micro_batch_weight(x[:, 0].abs().sum())
    return loss


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_reductions(reduction: str) -> None:
    model = mlp()
    step = quick(weighed if reduction == "weighted" else plain_step, 3, reduction=reduction)
    verdict = step.self_check(model, sgd(model), *batch())
    assert verdict, str(verdict)


def test_objects_in_a_closure_and_in_self() -> None:
    model = mlp()
    optimizer = sgd(model)

    def forward(x: Tensor) -> Tensor:
        return model(x)

    class Trainer:
        def __init__(self) -> None:
            self.model = model
            self.calls = 0

        @gradsync_fx.optimize(gradient_accumulation_steps=2, backend="aot_eager")
        def step(self, x: Tensor, y: Tensor) -> Tensor:
            loss = nn.functional.mse_loss(forward(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    before = copy.deepcopy(model.state_dict())
    trainer = Trainer()
    verdict = trainer.step.self_check(*batch())
    assert verdict, str(verdict)
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_it_leaves_no_trace_in_an_open_window() -> None:
    model = Convnet(dropout=0.5)
    optimizer = adamw(model)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    step = quick(classified, 4)
    images, classes = torch.randn(4, 1, 8, 8), torch.randint(10, (4,))
    step(model, optimizer, scheduler, images, classes)
    sums = {name: t.clone() for name, t in step.gradients().items()}
    held, numbers = copy.deepcopy(model.state_dict()), (torch.get_rng_state(), random.getstate())
    assert step.self_check(model, optimizer, scheduler, images, classes)
    assert (step.pending, step.micro_step, step.optimizer_step) == (1, 1, 0)
    assert all(torch.equal(t, sums[name]) for name, t in step.gradients().items())
    assert all(torch.equal(t, held[name]) for name, t in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), numbers[0])
    assert random.getstate() == numbers[1]
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())


def test_the_option_checks_ahead_of_the_first_call() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2, self_check=True)
    with mock.patch.object(
        gradsync_fx.optimized_step, "check", wraps=gradsync_fx.optimized_step.check
    ) as checks:
        for _ in range(3):
            step(model, optimizer, *batch())
    assert checks.call_count == 1
    assert (step.micro_step, step.optimizer_step) == (3, 1)


@pytest.mark.parametrize("rate", [0.1, 1e-4])
def test_a_wrong_program_is_found(rate: float) -> None:
    """Sums that lose a twentieth: of a step that is large or tiny beside the weights."""
    model = mlp()
    optimizer = sgd(model, rate)
    step = quick(plain_step, 2, self_check=True)
    before = copy.deepcopy(model.state_dict())
    with wrong_divisors(), pytest.raises(VerificationError, match="NOT equal") as caught:
        step(model, optimizer, *batch())
    assert "parameter 0.weight: differs by" in caught.value.seen
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert step.micro_step == 0


def wrong_divisors() -> Any:
    """Every window of the runtime is divided by a number a little too large."""
    right = gradsync_fx.runtime.ending.Ending.divisors

    def wrong(self: Any, totals: list[float]) -> Any:
        return {key: 1.05 * value for key, value in right(self, totals).items()}

    return mock.patch.object(gradsync_fx.runtime.ending.Ending, "divisors", wrong)


def test_what_cannot_be_copied_is_named() -> None:
    model = mlp()
    rows = (batch() for _ in range(9))

    def step(model: nn.Module, optimizer: Any) -> Tensor:
        return plain_step(model, optimizer, *next(rows))

    with pytest.raises(WindowError, match="rows"):
        quick(step, 2).self_check(model, sgd(model))


def test_windows_without_one_length_are_refused() -> None:
    model = mlp()
    with pytest.raises(WindowError, match="manual"):
        quick(plain_step, "manual").self_check(model, sgd(model), *batch())


@pytest.mark.gloo
@pytest.mark.parametrize("wrap", ["ddp", "plain", "by hand"])
def test_two_ranks(ranks: Ranks, wrap: str) -> None:
    for equal, text, moved in ranks(checked.both_ways, wrap):
        assert equal, text
        assert "on 2 ranks" in text
        assert not moved


@pytest.mark.gloo
@pytest.mark.captured
def test_a_difference_on_one_rank_is_told_to_all(ranks: Ranks) -> None:
    for equal, text, _ in ranks(checked.one_wrong):
        assert not equal
        assert "NOT equal" in text


def test_globals_of_an_imported_module() -> None:
    """Copied with the step; those behind a module's name are refused. Neither way are the originals trained."""

    def through_the_module(x: Tensor, y: Tensor) -> Tensor:
        return trained_elsewhere.train_step(x, y)

    before = copy.deepcopy(trained_elsewhere.model.state_dict())
    batch = torch.randn(4, 6), torch.randn(4, 1)
    assert quick(trained_elsewhere.train_step, 2).self_check(*batch).equal
    step = quick(through_the_module, 2)
    error = refused(gradsync_fx.WindowError, "self_check", lambda: step.self_check(*batch))
    assert "pass model and optimizer" in error.fix
    for name, value in trained_elsewhere.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in trained_elsewhere.model.parameters())
