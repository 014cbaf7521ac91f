"""CUDA graphs: what torch would record of the programs, and what its replays compute under a scheduler.

torch's own recording code runs, with a recorder for the device, over the generated kernels in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.cross.conftest import Workers


pytestmark = [pytest.mark.cross, pytest.mark.captured]


Trained = Callable[..., dict[str, Any]]


@pytest.fixture
def trained(workers: Workers) -> Trained:
    """Six updates by replays, beside those of an eager loop."""
    return lambda *fault: workers("interpret", "replay", workers("compile", "record", *fault))


def test_replays_train_as_an_eager_loop_does(trained: Trained) -> None:
    """Clipping, bias corrections, and a learning rate that is another at each update."""
    found = trained()
    assert found["verdicts"] == dict.fromkeys(("accumulate", "boundary", "tail"), "recorded")
    assert found["parts"] == dict.fromkeys(
        found["verdicts"], 1
    )  # whole, without a part on the host
    assert found["recordings"] == 2  # one for each program that ran; all other calls are replays
    assert found["worst"] < 1e-4


def test_replays_of_numbers_that_are_pythons_are_found(trained: Trained) -> None:
    found = trained("float")
    assert found["recordings"] == 2  # nobody says that the learning rate is the first one's
    assert found["worst"] > 0.1
