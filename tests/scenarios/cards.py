"""The checks that gpu_check.py lets ranks make, with the CPU in a card's place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import gradsync_fx


BENCHMARKS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


def checked(rank: int, name: str, without: str = "") -> list[tuple[bool | None, str]]:
    """Every line of one check, and whether it is well. without: an option that steps are not given."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import gpu_shares  # type: ignore[import-not-found]
    finally:
        sys.path.remove(str(BENCHMARKS))
    plain = gradsync_fx.optimize

    def optimize(step: Any, **options: Any) -> Any:
        options.pop(without, None)
        return plain(step, **options)

    with mock.patch.object(gradsync_fx, "optimize", optimize):
        check = getattr(gpu_shares, name)
        lines = list(check(torch.device("cpu"), "gloo", backend="aot_eager"))
    return [(line.ok, str(line)) for line in lines]
