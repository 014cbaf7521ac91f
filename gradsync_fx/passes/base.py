"""The shape of a pass, and the runner that applies, times and journals it."""

from __future__ import annotations

import time
from collections.abc import Callable

from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.journal import Entry, Journal
from gradsync_fx.planning.plan import Plan


Pass = Callable[[Draft, Plan], None]


def run_passes(draft: Draft, plan: Plan, passes: list[Pass], journal: Journal) -> None:
    """Applies the passes in order and writes the journal. The finished program is checked once (`Draft.finish`)."""
    for one in passes:
        before, start = len(draft.graph.nodes), time.perf_counter()
        one(draft, plan)
        for node in draft.graph.nodes:
            if "origin" not in node.meta:
                node.meta.setdefault("made_by", one.__name__)  # for the report
        spent = (time.perf_counter() - start) * 1e3
        journal.entries.append(
            Entry(draft.name, one.__name__, spent, before, len(draft.graph.nodes))
        )
