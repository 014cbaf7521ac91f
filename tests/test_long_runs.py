"""Many windows on two ranks leave nothing behind. How long a call takes is not looked at here: see long_run.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.test_benchmarks import run


pytestmark = [pytest.mark.gloo, pytest.mark.captured]


def test_many_windows(tmp_path: Path) -> None:
    """From the middle of the run to its end."""
    asked = ["--windows", "150", "--backend", "aot_eager", "--out", str(tmp_path)]
    done = run("long_run.py", *asked)
    assert done.returncode == 0, done.stdout + done.stderr
    ranks = json.loads((tmp_path / "long_run.json").read_text())
    for rows in ranks:
        middle, end = rows[len(rows) // 2 - 1], rows[-1]
        assert end["window"] == end["updates"] == 150
        assert middle["window"] == 75
        assert middle["tensors"] == end["tensors"]
        assert abs(middle["objects"] - end["objects"]) < 100
        if end["resident"] is not None:
            assert end["resident"] - middle["resident"] < 4 * 2**20
        assert all(row["programs"] == 2 for row in rows)
        assert all(row["apart"] < 1e-12 for row in rows)
    mine, other = ([row["sum"] for row in rows] for rows in ranks)
    assert mine == other
