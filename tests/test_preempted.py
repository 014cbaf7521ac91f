"""The example that is asked to stop, under torchrun: at any point, the run ends as the undisturbed one, bit for bit."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.long import some_long


ROOT = Path(__file__).resolve().parent.parent
UPDATES = 150
BEGUN = re.compile(r"rank (\d): process (\d+) begins after update (\d+)")
STOPPED = re.compile(r"rank \d: saved after update (\d+), stops")
PATIENCE = 600.0


def run(folder: Path, stops: int, seed: int) -> str:
    """What the example prints. stops: how often one of its ranks is asked to stop, at a random time of its life."""
    chosen, asked, known = random.Random(seed), 0, 0
    printed = folder / "printed"
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"),
        *("--standalone", "--max-restarts", str(stops + 1), "examples/preemptible.py"),
        *("--folder", str(folder), "--updates", str(UPDATES), "--backend", "aot_eager"),
    ]
    end = time.monotonic() + PATIENCE
    with printed.open("w") as out:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )  # fmt: skip
    try:
        while process.poll() is None:
            assert time.monotonic() < end, printed.read_text()
            begun = BEGUN.findall(printed.read_text())
            if len(begun) > known and len(begun) % 2 == 0 and asked < stops:
                known, asked = len(begun), asked + 1
                time.sleep(chosen.uniform(0, 1.5))
                victim = chosen.choice(begun[-2:])[1]
                try:
                    os.kill(int(victim), signal.SIGTERM)
                except ProcessLookupError:
                    break  # the run is over
            time.sleep(0.05)
        assert process.wait(PATIENCE) == 0, printed.read_text()
    finally:
        process.kill()
    return printed.read_text()


def state(folder: Path, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(folder / f"update-{UPDATES}" / f"rank{rank}.pt")
    return found


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.timeout(2 * PATIENCE)
@pytest.mark.parametrize("stops", some_long((1, 10), 2))
def test_stopped_at_random_points(stops: int, tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    run(whole, 0, 0)
    printed = run(broken, stops, stops)
    points = [int(update) for update in STOPPED.findall(printed)]
    assert points
    assert points[::2] == points[1::2], "the ranks stopped at different updates"
    for rank in range(2):
        torch.testing.assert_close(state(broken, rank), state(whole, rank), atol=0, rtol=0)
