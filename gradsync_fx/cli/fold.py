"""Folds a diff of two long programs: unchanged stretches, and changes that repeat once per parameter.

+ adamw = adamw_0(parameter_a, ...)          shown
+ getitem = adamw[0]                         shown
  ... 46 more lines: these 2, 23 times       in place of the same for each other parameter
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from itertools import groupby

from gradsync_fx.wording import number_of


SAME, REMOVED, ADDED, FOLDED = " ", "-", "+", "..."
CONTEXT = 2  # unchanged lines shown on each side of a change
PERIOD = 6  # the most lines that may make up what repeats
TIMES = 3  # how often it has to, to be folded
SHOWN = 2  # changes that are shown in any case
_CALL = re.compile(r"= ([\w.]+)\(\[?([a-z]*)")
_ITEM = re.compile(r"= \w+\[\d+\]")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the diff. left, right: a line of each program, "" where it has none; both say what was folded."""

    kind: str
    left: str
    right: str


def folded(left: Sequence[str], right: Sequence[str]) -> list[Row]:
    """The diff of two programs, short enough to be read."""
    rows = list(_compared(left, right))
    stretches = [list(group) for _, group in groupby(rows, key=lambda row: row.kind)]
    known = _known(stretches)
    found: list[Row] = []
    quiet: list[Row] = []  # what one line will stand for
    for i, stretch in enumerate(stretches):
        if stretch[0].kind == SAME or i in known:
            quiet += stretch
            continue
        found += _folded(quiet, first=not found)
        quiet = []
        found += _repeated(stretch)
    return found + _folded(quiet, first=not found, last=True)


def _known(stretches: Sequence[list[Row]]) -> set[int]:
    """Changes between others that do nothing that was not shown before: a bucket like the two above it."""
    changed = [i for i, stretch in enumerate(stretches) if stretch[0].kind != SAME]
    seen: set[tuple[str, str]] = set()
    known = set()
    for number, i in enumerate(changed):
        does = {(row.kind, _key(row.left or row.right)) for row in stretches[i]}
        if number >= SHOWN and does <= seen and i != changed[-1]:
            known.add(i)
        seen |= does
    return known


def _compared(left: Sequence[str], right: Sequence[str]) -> Iterator[Row]:
    matcher = SequenceMatcher(None, left, right, autojunk=False)
    for kind, a, b, c, d in matcher.get_opcodes():
        if kind == "equal":
            yield from (Row(SAME, line, line) for line in left[a:b])
        else:
            yield from (Row(REMOVED, line, "") for line in left[a:b])
            yield from (Row(ADDED, "", line) for line in right[c:d])


def _folded(rows: list[Row], *, first: bool, last: bool = False) -> list[Row]:
    start, end = (0 if first else CONTEXT), (0 if last else CONTEXT)
    inside = rows[start : len(rows) - end]
    same = sum(row.kind == SAME for row in inside)
    if len(inside) < TIMES:
        return rows
    text = f"    ... {number_of(same, 'unchanged line')}"
    if same < len(inside):
        places = sum(kind != SAME for kind, _ in groupby(row.kind for row in inside))
        text += f"; among them {number_of(places, 'more change')} like those above"
    return [*rows[:start], Row(FOLDED, text, text), *rows[len(rows) - end :]]


def _repeated(rows: list[Row]) -> list[Row]:
    """A stretch of added or of removed lines: of what repeats, the first time."""
    keys = [_key(row.left or row.right) for row in rows]
    found: list[Row] = []
    at = 0
    while at < len(rows):
        period, times = _repetition(keys, at)
        if times < TIMES:
            found.append(rows[at])
            at += 1
            continue
        found += rows[at : at + period]
        more = period * (times - 1)
        again = "like this" if period == 1 else f"these {period}, {times - 1} times"
        text = f"    ... {number_of(more, 'more line')} {again}"
        text = text.replace(" these", ": these")
        kind = rows[at].kind
        found.append(Row(FOLDED, text if kind == REMOVED else "", text if kind == ADDED else ""))
        at += period * times
    return found


def _repetition(keys: Sequence[str], at: int) -> tuple[int, int]:
    """How many lines from `at` on repeat, and how often; of several answers, the one that covers most."""
    best = (1, 1)
    for period in range(1, PERIOD + 1):
        unit, times = keys[at : at + period], 1
        while keys[at + times * period : at + (times + 1) * period] == unit:
            times += 1
        if times >= TIMES and period * times > best[0] * best[1]:
            best = (period, times)
    return best


def _key(line: str) -> str:
    """What a line does: its op, and the kind of its first input."""
    if _ITEM.search(line) is not None:
        return "[]"
    call = _CALL.search(line)
    return f"{call[1]}({call[2]}" if call is not None else line
