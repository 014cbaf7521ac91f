"""What a window holds: told at once where a micro-step counts in any case, else read when somebody asks."""

from __future__ import annotations

import torch
from torch import nn

from gradsync_fx._torch import FakeTensor, FakeTensorMode
from gradsync_fx.options import Options
from gradsync_fx.runtime.accumulators import Accumulators


def with_sums() -> Accumulators:
    held = Accumulators(1)
    held.place_weights(torch.zeros(()))
    parameters = dict(nn.Linear(2, 1).named_parameters())
    held.make(parameters, parameters, Options())
    return held


def test_a_term_that_counts_in_any_case_is_there_at_once() -> None:
    held = with_sums()
    held.added(["weight"], weighed=False)
    assert list(held.read_in_window()) == ["weight"]


def test_a_weighed_term_is_there_once_its_weight_was_read_and_is_not_zero() -> None:
    held = with_sums()
    held.added(["weight"], weighed=True)  # of weight 0
    assert list(held.read_in_window()) == []
    held.weights[0].add_(3)
    held.added(["bias"], weighed=True)
    held.weights[0].add_(2)  # a later call's: that one reads for itself
    assert list(held.read_in_window()) == ["bias"]
    held.closed([0])
    assert list(held.read_in_window()) == []


def test_terms_that_were_saved_come_back_with_their_weights() -> None:
    held = with_sums()
    held.weights[0].add_(3)
    held.added(["bias"], weighed=True)
    held.restore_in_window(["weight"])
    assert list(held.read_in_window()) == ["weight"], "what was not read yet is gone"
    held.added(["bias"], weighed=True)  # of weight 0 again
    assert list(held.read_in_window()) == ["weight"]


def test_weights_and_sums_beside_fake_parameters_are_fake() -> None:
    held = Accumulators(1)
    with FakeTensorMode():
        parameters = dict(nn.Linear(2, 1).named_parameters())
    held.place_weights(parameters["weight"])
    held.make(parameters, parameters, Options())
    assert all(isinstance(t, FakeTensor) for t in (*held.weights.values(), *held.sums.values()))
    assert held.weights[0].dtype is torch.float64


def test_a_weight_that_was_restored_moves_with_its_value() -> None:
    held = Accumulators(1)
    held.weights[0] = torch.tensor(3.0)
    held.place_weights(torch.zeros(()))
    assert held.weights[0].dtype is torch.float64
    assert held.weights[0] == 3
