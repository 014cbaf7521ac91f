"""What a report says of values that are computed once per window."""

from __future__ import annotations

import json

import pytest

from gradsync_fx.inspection.report import Report
from tests.scenarios import once


pytestmark = pytest.mark.captured


def report(kind: str) -> Report:
    with once.all_of_it():
        return once.Optimized(kind, 3).run(3).step.report()


def test_what_is_held_of_what_and_where() -> None:
    found = report("weight norm").once
    assert found is not None
    by_kind = {what: [h for h in found.held if h.what == what] for what in ("value", "sum", "copy")}
    size = 4 * once.WIDTH * once.WIDTH
    assert [h.bytes for h in by_kind["value"]] == [size, size]
    assert [h.bytes for h in by_kind["sum"]] == [size, size]
    assert by_kind["copy"]
    for held in (*by_kind["value"], *by_kind["sum"]):
        layer = held.of[0].partition(".")[0]
        assert {f"{layer}.parametrizations.weight.original{i}" for i in (0, 1)} == set(held.of)
        assert "once.py" in held.line
    assert found.bytes == sum(h.bytes for h in found.held)
    assert found.found >= len(by_kind["value"])


def test_in_text_data_and_page() -> None:
    found = report("quantised")
    assert "once per window" in str(found)
    assert json.loads(found.to_json())["once"]["held"][0]["what"] == "value"
    page = found.to_html()
    assert "once-table" in page
    prologue = [n for n in found.graph if n.region == "prologue"]
    assert prologue
    names = {n.name for n in prologue}
    readers = [n for n in found.graph if n.op == "invariant"]
    assert readers
    assert all(set(n.inputs) <= names for n in readers)
    assert {p.name for p in found.programs} == {"accumulate", "boundary", "prologue"}


def test_nothing_is_said_where_nothing_is_held() -> None:
    found = once.Optimized("weight norm", 1).run(1).step.report()
    assert found.once is not None
    assert found.once.held == ()
    assert "once per window" not in str(found)
    assert not [n for n in found.graph if n.region == "prologue"]
