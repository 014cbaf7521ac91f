"""Fixtures for tests of kernels."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lowering.kernels import knowing_none


@pytest.fixture
def cache(tmp_path: Path) -> Iterator[Path]:
    """A cache folder of its own, and a process that knows no kernel."""
    with knowing_none(tmp_path) as folder:
        yield folder
