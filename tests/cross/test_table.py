"""The tables of docs/gpus.md say what is made: the rows of the MLP with all optimizations are made again here."""

from __future__ import annotations

import pytest

from tests.cross.conftest import Lower
from tests.cross.table import PAGE, TABLES, made, table


pytestmark = [pytest.mark.cross, pytest.mark.captured]


def rows_of(model: str) -> list[str]:
    found = TABLES.search(PAGE.read_text())
    assert found is not None
    return [line for line in found[0].splitlines() if line.startswith(f"| {model} |")]


def test_tables_are_what_is_made(lower: Lower) -> None:
    lines = table("", made("mlp", lower)).splitlines()[2:]
    assert len(lines) == 3
    assert rows_of("mlp")[:3] == lines, "they are behind: python -m tests.cross.table renews them"


def test_every_model_has_its_rows() -> None:
    assert [len(rows_of(model)) for model in ("bert", "resnet")] == [3, 3]
    assert len(rows_of("gpt")) == 3 + 12
