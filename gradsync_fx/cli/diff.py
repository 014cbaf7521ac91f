"""`gradsync-fx diff`: two programs as readable Python, side by side or as a unified diff.

The signature is a count of inputs by kind, `x = None` (where a value ends) is left out, `torch.ops.aten.` is `aten.`,
and inputs have the names that they have in the model: `arg0_1` is `parameter_fc_weight`. What repeats is folded
(fold.py). For looking at, not for running.
"""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from gradsync_fx.cli.fold import ADDED, FOLDED, REMOVED, SAME, Row, folded
from gradsync_fx.inspection.data import ReportData
from gradsync_fx.wording import number_of


COLUMN = 76  # the least width of a side
SEPARATOR = 3
ENDS = re.compile(r";  (?:\w+ = )+None(?=\s*(?:#.*)?$)")
NAMED = ("parameter", "buffer", "data", "accumulator")
KINDS = (*NAMED, "state", "scalar", "weight")
ALIKE = re.compile(r"\b([a-z]\w*?)(?:_\d+)?(?:, \1(?:_\d+)?){3,}(?!\w)")


def codes(report: ReportData) -> dict[str, str]:
    """Name to code of the two programs, as they are in the report."""
    found = {p.name: p.code for p in report.programs}
    return {name: found[name] for name in ("accumulate", "boundary") if name in found}


def readable_code(code: str, names: dict[str, str]) -> str:
    """names: of inputs, to the names that they are to have."""
    lines = []
    for line in code.strip().splitlines():
        text = ENDS.sub("", line).replace("torch.ops.", "").rstrip()
        text = re.sub(r"\b\w+\b", lambda found: names.get(found[0], found[0]), text)
        if text.startswith("def "):
            head, arguments = text.removesuffix("):").split("(", 1)
            text = f"{head}({_by_kind(arguments.split(', ')[1:])}):"
        if text.strip():
            lines.append(ALIKE.sub(_shortened, text))
    return "\n".join(lines)


def _by_kind(inputs: Sequence[str]) -> str:
    """`24 parameters, 1 data, 24 accumulators`: what goes in, in the order of the kinds."""
    kinds = Counter(
        next((k for k in KINDS if name.startswith(f"{k}_")), "other input") for name in inputs
    )
    alike = {"data": "data", "state": "state"}  # the same for one and for many
    return ", ".join(
        number_of(kinds[k], k, alike.get(k, "")) for k in (*KINDS, "other input") if kinds[k]
    )


def _shortened(found: re.Match[str]) -> str:
    """`scalar_3, ... 5 more, scalar_9`: names in a row that differ by a number alone, or by none."""
    names = found[0].split(", ")
    return f"{names[0]}, ... {len(names) - 2} more, {names[-1]}"


def input_names(report: ReportData) -> dict[str, str]:
    """Inputs by what they hold; an input keeps its own name where the better one is taken."""
    taken = {node.name for node in report.graph}
    found: dict[str, str] = {}
    for node in report.graph:
        if node.region != "input" or node.op not in NAMED:
            continue
        name = re.sub(r"\W", "_", f"{node.op}_{node.parameter}")
        if node.parameter and name not in taken:
            found[node.name] = name
            taken.add(name)
    return found


def to_sides(report: ReportData, width: int, *, unified: bool) -> RenderableType:
    """Both programs in `width` columns; unified where asked for, or where two columns would be too narrow."""
    names = input_names(report)
    left, right = (readable_code(code, names).splitlines() for code in codes(report).values())
    rows = folded(left, right)
    column = (width - SEPARATOR) // 2
    if unified or column < COLUMN:
        return _unified(rows, width)
    return _side_by_side(rows, column)


def _unified(rows: Sequence[Row], width: int) -> RenderableType:
    styles = {ADDED: "green", REMOVED: "red", FOLDED: "cyan", SAME: ""}
    lines = [Text("--- accumulate", style="red"), Text("+++ boundary", style="green")]
    for row in rows:
        mark = SAME if row.kind == FOLDED else row.kind
        text = "\n".join(_wrapped(row.right or row.left, mark, width))
        lines.append(Text(text, style=styles[row.kind]))
    return Group(*lines)


def _wrapped(text: str, mark: str, width: int) -> list[str]:
    """The line, and below it what does not fit, further in."""
    inside = " " * (len(text) - len(text.lstrip()) + 4)
    return textwrap.wrap(
        mark + text,
        width,
        subsequent_indent=f" {inside}",
        break_on_hyphens=False,
        drop_whitespace=True,
    )


def _side_by_side(rows: Sequence[Row], column: int) -> RenderableType:
    table = Table.grid(padding=(0, SEPARATOR, 0, 0), expand=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    table.add_row(Text("accumulate", style="bold"), Text("boundary", style="bold"))
    for row in rows:
        if row.kind == FOLDED:
            table.add_row(*(Text(side, style="cyan") for side in (row.left, row.right)))
            continue
        changed = {REMOVED: ("on #3f1d1d", ""), ADDED: ("", "on #12351f")}.get(row.kind, ("", ""))
        sides = []
        for text, style in zip((row.left, row.right), changed, strict=True):
            side = _coloured("\n".join(_wrapped(text, "", column - SEPARATOR)))
            side.stylize(style)
            sides.append(side)
        table.add_row(*sides)
    return table


def _coloured(code: str) -> Text:
    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    text = syntax.highlight(code)
    text.rstrip()
    return text
