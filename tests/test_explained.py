"""torch's reason for a failed trace becomes an error with the user's line, and a way out that works."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.errors import OptionError
from gradsync_fx.explained import explained
from tests.drive import quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import mse
from tests.refusals import refused


def test_an_error_of_ours_inside_torchs_is_it() -> None:
    ours, torchs = OptionError("it", seen="this"), RuntimeError("in torch's words")
    torchs.__cause__ = ours
    assert explained(torchs, test_an_error_of_ours_inside_torchs_is_it) is ours


def test_the_last_line_of_the_users() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        if loss > 1e9:
            loss = loss * 2
        loss.backward()
        optimizer.step()
        return loss

    model, line = mlp(), step.__code__.co_firstlineno + 2
    args = (model, sgd(model), torch.ones(4, 8), torch.ones(4, 1))
    error = refused(gradsync_fx.CaptureError, f"test_explained.py:{line}", quick(step, 2), *args)
    assert 'on_unsupported="eager"' in error.fix
