"""Process groups other than the default one, and other work between the calls."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.eagerly import programs
from tests.reference import accumulation, mse, regression
from tests.scenarios import groups
from tests.workers import Ranks


pytestmark = pytest.mark.gloo
HERE = Path(__file__).parent


def check(found: dict[str, Any], expected: list[Tensor]) -> None:
    for ours, theirs in zip(found["parameters"], expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


def test_the_data_parallel_dimension_of_a_mesh(ranks: Ranks) -> None:
    both = ranks(groups.in_a_mesh, (1, 2))
    for found in both:
        check(found, groups.joined(0, 1))
        assert found["all_reduces"] == 1


def test_a_mesh_whose_data_dimension_is_one_rank(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks(groups.in_a_mesh, (2, 1))):
        check(found, groups.joined(rank))
        assert found["all_reduces"] == 0


def test_beside_another_group(ranks: Ranks) -> None:
    both = ranks(groups.beside_another_group)
    for found in both:
        check(found, groups.joined(0, 1))
    assert both[0]["means"] == both[1]["means"]
    model, _ = groups.fresh()
    first = [mse(model, *regression(1, 2, seed=rank)[0][0]).item() for rank in (0, 1)]
    assert both[0]["means"][0] == pytest.approx(sum(first) / 2)


def test_the_backend_is_optimize(ranks: Ranks) -> None:
    for found in ranks(groups.through_torch_compile):
        ours, reduced, compiled = found["optimize"]
        theirs, also_reduced, also_compiled = found["backend"]
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
        assert reduced == also_reduced == [0, 1, 0, 1, 0]
        assert compiled == also_compiled == programs(3)


def test_evaluation_inside_a_window(ranks: Ranks) -> None:
    both = ranks(groups.with_evaluation_between)
    model, optimizer = groups.fresh()
    parts = [regression(2, 1, seed=rank) for rank in (0, 1)]
    merged: Any = [
        [tuple(map(torch.cat, zip(*same, strict=True))) for same in zip(*batches, strict=True)]
        for batches in zip(*parts, strict=True)
    ]
    accumulation(model, optimizer, [merged[0] + merged[1]])
    for found in both:
        check(found, groups.parameters(model))
        assert found["pending"] == [1, 0]
        assert found["compiled"] == programs(2)


def test_torchrun_restarts_from_a_checkpoint(tmp_path: Path) -> None:
    """Initialised after the step was made; a rank that fails inside a window; a restart that goes on from the file."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"),
            *("--max-restarts=1", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
            *(str(HERE / "restarted.py"), str(tmp_path)),
        ],
        cwd=HERE.parent,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    expected = groups.joined(0, 1, windows=2, k=3)
    for rank in (0, 1):
        found = torch.load(tmp_path / f"end{rank}.pt", weights_only=True)
        assert found["restarts"] == "1"
        check(found, expected)
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            torch.load(tmp_path / "end0.pt", weights_only=True)["parameters"],
            torch.load(tmp_path / "end1.pt", weights_only=True)["parameters"],
            strict=True,
        )
    )
