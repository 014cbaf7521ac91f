"""The benchmarks in their smallest form: what they write, and what they say where they cannot run. Nothing is timed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch


ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "examples" / "benchmarks"


def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BENCHMARKS / name), *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.mark.gloo
def test_table_of_ways(tmp_path: Path) -> None:
    """Two ranks, ways that need no Inductor: equal losses, the collectives that each way is known for, three files."""
    ways = "accelerate-every-batch,accelerate-late,accelerate,ddp,ddp-zero,"
    ways += "gradsync,gradsync-bf16,gradsync-sharded,floor"
    asked = ["--workloads", "tiny", "--ways", ways, "--placements", "loopback", "--windows", "2"]
    done = run(
        "gradient_sync_table.py",
        *asked,
        "--quick",
        "--backend",
        "aot_eager",
        "--out",
        str(tmp_path),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    written = json.loads((tmp_path / "figures.json").read_text())
    (comparison,) = written["comparisons"]
    found = {figures["way"]: figures for figures in comparison["figures"]}
    assert list(found) == ways.split(",")
    for figures in found.values():
        assert not figures["failure"]
        assert figures["equal"]
        for call in ("micro_step", "accumulate", "boundary"):
            spread = figures[call]
            assert 0 < spread["low"] <= spread["median"] <= spread["high"]
    all_reduces = {way: figures["traffic"]["all_reduces"] for way, figures in found.items()}
    once = {"accelerate": 1, "ddp": 1, "ddp-zero": 1, "gradsync": 1, "gradsync-bf16": 1}
    once |= {"gradsync-sharded": 0, "floor": 0}
    assert all_reduces == {"accelerate-every-batch": 4, "accelerate-late": 4, **once}
    size = 4 * comparison["parameters"]
    payload = {way: figures["traffic"]["payload"] for way, figures in found.items()}
    assert payload["ddp"] == payload["gradsync"] == 2 * payload["gradsync-bf16"] == size
    table = (tmp_path / "table.md").read_text()
    assert table.count("| gradsync_fx |") == 2
    assert "<svg" in (tmp_path / "plot.svg").read_text()
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--ways", "deepspeed"], "'deepspeed' is none of"),
        (["--windows", "0"], "'0' is not a number of at least 1"),
    ],
)
def test_wrong_arguments(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from gradient_sync_table import arguments as parse  # type: ignore[import-not-found]

    monkeypatch.setattr(sys, "argv", ["gradient_sync_table.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        parse()
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_growth_with_depth(tmp_path: Path) -> None:
    """More layers, more nodes; each stage of ours took some of the time."""
    done = run("growth.py", "--layers", "1,2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    one, two = json.loads((tmp_path / "growth.json").read_text())
    assert two["nodes"] > one["nodes"]
    assert all(seconds > 0 for seconds in one["seconds"].values())
    assert (tmp_path / "growth.md").read_text().startswith("| layers |")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has what the check needs")
def test_check_of_a_gpu_without_one() -> None:
    done = run("gpu_check.py")
    assert done.returncode == 2
    (line,) = done.stdout.splitlines()
    assert line.startswith("no CUDA device")
    assert "run this on a machine with a GPU" in line


def test_what_of_a_links_time_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from results import Comparison, Figures, Spread  # type: ignore[import-not-found]

    def figures(way: str, boundary: float, sent: float | None = None) -> Any:
        return Figures(way, boundary=Spread(boundary, boundary, boundary), sent=sent)

    # 50 MB are 0.4 s at a Gbit/s, and the boundary is 0.3 s longer for them.
    ours, peer, floor = (
        figures("gradsync", 0.5, 5e7),
        figures("ddp", 0.6, 5e7),
        figures("floor", 0.2),
    )
    slow = Comparison("", "", 4, 1, [peer, ours, floor], rate=1e9)
    assert slow.hidden(ours) == pytest.approx(0.25)
    assert slow.hidden(peer) is slow.hidden(floor) is None
    assert Comparison("", "", 4, 1, [peer, ours], rate=1e9).hidden(ours) is None
    assert Comparison("", "", 4, 1, [peer, ours, floor]).hidden(ours) is None


@pytest.mark.inductor
def test_what_people_bring() -> None:
    """A row that works, and one that is refused by name."""
    done = run("sweep.py", "PPO", "SparseAdam")
    assert done.returncode == 0, done.stderr
    works, refused = done.stdout.splitlines()[-2:]
    name, outcome, _, difference = works.strip("| ").split(" | ")
    assert (name, outcome) == ("PPO", "works")
    assert float(difference) < 1e-5
    assert refused.startswith("| SparseAdam | refused: ")
    assert "sparse" in refused
