"""CUDA graphs: what torch would record of the programs, and what its replays compute under a scheduler.

torch's own recording code runs, with a recorder for the device, over the generated kernels in Triton's interpreter.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cross.conftest import skip_without_toolchain


pytestmark = [pytest.mark.cross, pytest.mark.captured]


def trained(file: Path, *fault: str) -> dict[str, Any]:
    """Six updates by replays, beside those of an eager loop."""
    skip_without_toolchain()
    answers = []
    for job in (["lower", str(file), *fault], ["replay", str(file)]):
        command = [sys.executable, "-m", "tests.cross.replays", *job]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        answers.append(done.stdout)
    found: dict[str, Any] = json.loads(answers[-1].splitlines()[-1])
    return found


def test_replays_train_as_an_eager_loop_does(tmp_path: Path) -> None:
    """Clipping, bias corrections, and a learning rate that is another at each update."""
    found = trained(tmp_path / "made")
    assert found["verdicts"] == dict.fromkeys(("accumulate", "boundary", "tail"), "recorded")
    assert found["parts"] == dict.fromkeys(
        found["verdicts"], 1
    )  # whole, without a part on the host
    assert found["recordings"] == 2  # one for each program that ran; all other calls are replays
    assert found["worst"] < 1e-4


def test_replays_of_numbers_that_are_pythons_are_found(tmp_path: Path) -> None:
    found = trained(tmp_path / "made", "float")
    assert found["recordings"] == 2  # nobody says that the learning rate is the first one's
    assert found["worst"] > 0.1
