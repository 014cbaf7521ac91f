"""Which of many tests that are alike `make test` runs: the others are marked `long`, and left to `make test-all`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest


def some_long(values: Sequence[Any], every: int) -> list[Any]:
    """Parameters of a test, of which `make test` takes the first one and each `every`-th after it."""
    return [value if i % every == 0 else _long(value) for i, value in enumerate(values)]


def long_but(values: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    """Parameters of a test, of which `make test` takes those in `kept`."""
    return [value if value in kept else _long(value) for value in values]


def _long(value: Any) -> Any:
    several = value if isinstance(value, tuple) else (value,)
    return pytest.param(*several, marks=pytest.mark.long)
