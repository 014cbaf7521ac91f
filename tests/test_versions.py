"""`make test-torch` counts what it runs, and what was tested is said alike wherever a range of torch stands."""

from __future__ import annotations

import re
from dataclasses import replace

from gradsync_fx import _torch
from tests import versions
from tests.versions import PAGE, ROOT, Outcome


REPORT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase name="a"/>
<testcase name="b"><failure message="no"/></testcase>
<testcase name="c"><skipped message="a fault of torch 2.14"/></testcase>
<testcase name="d"><error message="no"/></testcase>
<testcase name="e"><skipped message="a fault of torch 2.14"/></testcase>
</testsuite></testsuites>
"""


def test_outcomes_are_counted() -> None:
    seen = versions.read(REPORT, "2.14.1", "3.11", "2026-11-28")
    assert seen == Outcome("2.14.1", "3.11", "2026-11-28", 1, 2, {"a fault of torch 2.14": 2})
    assert seen.row() == "| 2.14.1 | 3.11 | 2026-11-28 | 1 | 2 | 2: a fault of torch 2.14 |\n"


def test_a_row_takes_the_place_of_the_one_before() -> None:
    text = "above\n<!-- versions -->\n" + versions.HEAD + "<!-- end of versions -->\nbelow\n"
    old = Outcome("2.9.1", "3.11", "2026-01-01", 1, 1, {})
    for outcome in (old, replace(old, torch="2.10.0"), replace(old, failed=0, passed=2)):
        text = versions.with_row(text, outcome)
    assert list(versions.rows(text)) == ["2.10.0", "2.9.1"]
    assert versions.rows(text)["2.9.1"] == "| 2.9.1 | 3.11 | 2026-01-01 | 2 | 0 | 0 |\n"
    assert text.startswith("above\n")
    assert text.endswith("below\n")


def test_the_range_is_what_the_table_says_was_tested() -> None:
    (oldest, newest) = _torch.OLDEST, _torch.NEWEST
    rows = versions.rows(PAGE.read_text())
    tested = sorted(tuple(int(n) for n in version.split(".")[:2]) for version in rows)
    assert (tested[0], tested[-1]) == (oldest, newest)
    assert all(row.split("|")[5].strip() == "0" for row in rows.values()), "a version fails"
    required = f'"torch>={oldest[0]}.{oldest[1]},<{newest[0]}.{newest[1] + 1}"'
    assert required in (ROOT / "pyproject.toml").read_text()
    said = f"torch {oldest[0]}.{oldest[1]} to {newest[0]}.{newest[1]}"
    for page in (PAGE, ROOT / "README.md"):
        assert re.search(rf"{re.escape(said)}\b", page.read_text())


def test_the_core_is_there_and_its_tools_are_pinned() -> None:
    assert all((ROOT / name).is_file() for name in versions.CORE)
    assert len(versions.pinned(versions.TOOLS, (ROOT / "constraints.txt").read_text())) == len(
        versions.TOOLS
    )
