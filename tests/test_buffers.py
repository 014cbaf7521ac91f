"""State beside parameters: what depends on the update changes once a window, all else in every micro-step.

An average of the weights, a counter of samples, batch statistics, and the random numbers of dropout.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import drive, quick, step_of
from tests.models import Convnet, Lin, mlp
from tests.optimizers import sgd
from tests.reference import (
    accumulation,
    assert_same,
    assert_same_parameters,
    classification,
    images,
    mse,
    regression,
    twins,
)


@pytest.mark.captured
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
        assert_same_parameters(average, wanted)


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
