"""The journal of passes, as data: what each did to a program, and how long it took. Read by the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal: what a pass did to a program, and how long it took."""

    program: str
    name: str
    milliseconds: float
    nodes_before: int
    nodes_after: int


@dataclass(slots=True)
class Journal:
    """One entry for each pass that ran, in order."""

    entries: list[Entry] = field(default_factory=list)
