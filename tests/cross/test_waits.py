"""The host never waits for the device in warm calls: the runtime runs over fake tensors of one, and is watched."""

from __future__ import annotations

import pytest

from tests.cross.conftest import Workers


pytestmark = [pytest.mark.cross, pytest.mark.captured]


@pytest.mark.parametrize(
    ("name", "updates", "copies"),
    [
        ("plain", 2, 2),  # the numbers of each update, in one copy
        ("muon", 2, 2),  # with AdamW for the rest
        ("adafactor", 2, 2),  # whose own code asks for a norm of each parameter
        ("a k for each", 4, 4),
        ("weighed", 2, 10),  # and each micro-step's weight, for whoever asks for it later
    ],
)
def test_warm_calls_wait_for_nothing(
    name: str, updates: int, copies: int, workers: Workers
) -> None:
    assert workers("compile", "watch", name) == (8, updates, copies)


def test_a_weight_that_is_read_on_the_device_is_found(workers: Workers) -> None:
    with pytest.raises(pytest.fail.Exception, match="_local_scalar_dense"):
        workers("compile", "watch", "weighed", "weights")


def test_a_wait_for_this_window_is_found(workers: Workers) -> None:
    said = "the host waits: for what was queued 3 calls ago"
    with pytest.raises(pytest.fail.Exception, match=said):
        workers("compile", "watch", "weighed", "this window")


def test_memory_that_is_not_pinned_is_found(workers: Workers) -> None:
    with pytest.raises(pytest.fail.Exception, match="the host waits: memory that is not pinned"):
        workers("compile", "watch", "plain", "pageable")
