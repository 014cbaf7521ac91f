"""The host never waits for the device in warm calls: the runtime runs over fake tensors of one, and is watched."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cross.conftest import skip_without_toolchain


pytestmark = [pytest.mark.cross, pytest.mark.captured]


def watched(*arguments: str) -> tuple[int, str]:
    skip_without_toolchain()
    command = [sys.executable, "-m", "tests.cross.waits", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


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
def test_warm_calls_wait_for_nothing(name: str, updates: int, copies: int) -> None:
    failed, said = watched(name)
    assert not failed, said
    assert f"8 calls, {updates} updates, {copies} copies" in said


def test_a_weight_that_is_read_on_the_device_is_found() -> None:
    failed, said = watched("weighed", "weights")
    assert failed
    assert "_local_scalar_dense" in said


def test_a_wait_for_this_window_is_found() -> None:
    failed, said = watched("weighed", "this window")
    assert failed
    assert "the host waits: for what was queued 3 calls ago" in said


def test_memory_that_is_not_pinned_is_found() -> None:
    failed, said = watched("plain", "pageable")
    assert failed
    assert "the host waits: memory that is not pinned" in said
