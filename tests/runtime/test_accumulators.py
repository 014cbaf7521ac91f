"""What a window holds: told at once where a micro-step counts in any case, else read when somebody asks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from gradsync_fx._torch import FakeTensor, FakeTensorMode
from gradsync_fx.options import Options
from gradsync_fx.runtime import accumulators as module
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


class Device:
    """In place of copies from a device: counts those that somebody waited for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waited = 0
        device = self

        class Copy:
            def __init__(self, tensor: torch.Tensor) -> None:
                self._held = tensor.tolist()

            def values(self) -> list[float]:
                device.waited += 1
                return self._held

        monkeypatch.setattr(module, "HostCopy", Copy)


def test_a_window_is_known_when_its_first_term_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later micro-steps of the same parameters tell nothing new: what the device has queued since goes on."""
    device, held = Device(monkeypatch), with_sums()
    held.added(["weight", "bias"], weighed=True)  # of weight 0: it did not count
    for _ in range(3):
        held.weights[0].add_(2)
        held.added(["weight", "bias"], weighed=True)
    assert list(held.read_in_window()) == ["weight", "bias"]
    assert device.waited == 2
    held.closed([0])
    assert held.read_in_window() == {}
    assert device.waited == 2


def test_a_later_term_of_other_parameters_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    device, held = Device(monkeypatch), with_sums()
    held.weights[0].add_(2)
    held.added(["weight"], weighed=True)
    held.added(["weight"], weighed=True)  # of weight 0
    held.added(["bias"], weighed=True)  # of weight 0
    assert list(held.read_in_window()) == ["weight"]
    assert device.waited == 3


def test_a_part_that_closed_is_read_of_what_came_since(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal weights of two windows of a part are not one micro-step that did not count."""
    Device(monkeypatch)
    held = Accumulators(2)
    held.place_weights(torch.zeros(()))
    first, second = (nn.Linear(1, 1, bias=False).weight for _ in range(2))
    optimizers = {torch.optim.SGD([p], lr=0.1): k for p, k in ((first, 1), (second, 2))}
    parameters = {"first": first, "second": second}
    held.make(parameters, parameters, Options(gradient_accumulation_steps=optimizers))
    for weight in held.weights.values():
        weight.fill_(3)
    held.added(["first", "second"], weighed=True)
    held.weights[0].zero_()
    held.closed([0])
    held.weights[0].fill_(3)
    held.weights[1].fill_(6)
    held.added(["first", "second"], weighed=True)
    assert set(held.read_in_window()) == {"first", "second"}


def test_terms_of_the_same_parameters_are_counted_call_by_call() -> None:
    held, same = with_sums(), ("weight",)
    for calls in range(1, 4):
        held.added(same, weighed=False)
        assert held.in_every(["weight"], calls)
    held.added(same, weighed=False)
    held.added(("bias",), weighed=False)
    held.added(same, weighed=False)
    assert not held.in_every(["weight"], 5)
    assert held.given().keys() == {"weight", "bias"}
    held.closed(frozenset({0}))
    assert held.in_every([], 0)
    assert not held.given()
    held.added(same, weighed=False)
    assert list(held.read_in_window()) == ["weight"]
    assert held.in_every(["weight"], 1)


def test_a_gradient_left_on_any_parameter_is_dropped() -> None:
    held = with_sums()
    held.drop_gradients()
    held.parameters["bias"].grad = torch.zeros_like(held.parameters["bias"])
    with pytest.warns(UserWarning, match="'bias' had a .grad"):
        held.drop_gradients()
    assert held.parameters["bias"].grad is None
