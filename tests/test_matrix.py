"""Options together, as users run them: Inductor, two ranks, each pair of values in some row, against plain PyTorch.

Every option and every optimization has to stand in `VALUES` or in `ELSEWHERE`; a new one fails the test that says so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from allpairspy import AllPairs

from gradsync_fx.options import OPTIMIZATIONS, Options
from tests.long import some_long
from tests.scenarios import matrix
from tests.workers import Ranks


VALUES: dict[str, tuple[Any, ...]] = {
    "optimizer": ("sgd", "adamw", "momentum", "adamw fused", "muon", "two windows"),
    "ending": ("full", "flush", "skip", "uneven", "discard", "resume"),
    "reduction": ("mean", "weighted", "sum"),
    "clip": ("none", "norm", "value"),
    "skip_nonfinite": (False, True),
    "sync_each_batch": (False, True),
    "reduce_dtype": (None, "bfloat16", "float16"),
    "accumulator_dtype": (None, "float64"),
    "bucket_cap_mb": (25.0, 0.001),
    "model": ("small", "large", "normed", "deep"),
    "k": (2, 1, 3),
    "wrap": ("ddp", "plain"),
    "divided": (None, "updates", "inside", "between", "hidden"),
    "commit": (None, "some"),
    "on_update": (None, "on one rank"),
    **{f"without {name}": (False, True) for name in OPTIMIZATIONS},
}
ELSEWHERE = {
    "without": "a column for each optimization",
    "gradient_accumulation_steps": "k, and the optimizer with two windows; manual windows: test_manual.py",
    "process_group": "test_ranks_groups.py",
    "shard_optimizer": "`divided`: updates",
    "overlap_param_gather": "`divided`: hidden, updates whose gathers end in the next call",
    "device_mesh": "`divided`: ranks inside of one machine, or between two; four ranks: test_two_levels.py",
    "broadcast_buffers": "the models have no buffers; with them: test_ranks.py",
    "on_unsupported": "no row is refused; eager windows: tests/eagerly.py",
    "rank_timeout": "test_faults.py",
    "self_check": "test_self_check.py",
    "verbose": "test_progress.py",
    "backend": "Inductor everywhere here; the others: nearly all other tests",
    "mode": "test_options.py",
    "dynamic": "test_shapes.py",
    "options": "test_options.py",
    "artifact": "another process loads it: test_artifact.py, with many options, and where updates are shared out",
}
# float16 and bfloat16 on the wire round; Muon multiplies in bfloat16, eagerly and compiled.
TOLERANCES = {"bfloat16": 1e-2, "float16": 1e-2, "muon": 3e-2, None: 2e-6}


def rows() -> Iterator[dict[str, Any]]:
    """A row for each pair of values of two columns at least."""
    for values in AllPairs(list(VALUES.values())):
        yield dict(zip(VALUES, values, strict=True))


def tolerance(row: dict[str, Any]) -> float:
    return max(
        TOLERANCES[key]
        for key in (None, row["reduce_dtype"], row["optimizer"])
        if key in TOLERANCES
    )


def title(row: Any) -> str:
    return ", ".join(f"{k}={v}" for k, v in row.items() if v != VALUES[k][0]) or "defaults"


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize("row", some_long(list(rows()), 2), ids=title)
def test_a_combination(row: dict[str, Any], ranks: Ranks) -> None:
    check(ranks, row)


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_three_ranks(three_ranks: Ranks) -> None:
    """One of them without data from the second window on."""
    row = {name: values[0] for name, values in VALUES.items()}
    row |= {
        "optimizer": "adamw",
        "reduction": "weighted",
        "clip": "norm",
        "ending": "uneven",
        "model": "large",
    }
    check(three_ranks, row)


def check(ranks: Ranks, row: dict[str, Any]) -> None:
    """As far from eager as the row's own rounding allows, and the same bits on all ranks."""
    for seen in ranks(matrix.combination, row):
        assert seen["alike"], "the ranks' parameters differ"
        assert seen["moved"] > 1e-3, "nothing was trained"
        assert max(seen["off"]) < tolerance(row), seen["off"]


def test_every_option_has_its_place() -> None:
    known = {f.name for f in fields(Options)}
    assert known == {*ELSEWHERE, *(set(VALUES) & known)}


def test_the_array_has_every_pair() -> None:
    found = list(rows())
    names = list(VALUES)
    for i, one in enumerate(names):
        for other in names[i + 1 :]:
            pairs = {(row[one], row[other]) for row in found}
            assert len(pairs) == len(VALUES[one]) * len(VALUES[other]), (one, other)
