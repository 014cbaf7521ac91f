"""Two programs as Python that people can read, side by side or as a unified diff.

Long signatures are folded, `x = None` (where a value ends) is left out, `torch.ops.aten.` is `aten.`, and inputs have
the names that they have in the model: `arg0_1` is `parameter_fc_weight`. For looking at, not for running.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from difflib import SequenceMatcher, unified_diff

from rich.console import Group, RenderableType
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text

from gradsync_fx.inspection.data import ReportData


COLUMN = 60  # the least width of a side
SEPARATOR = 3
FOLD = 76
ENDS = re.compile(r";  (?:\w+ = )+None(?=\s*(?:#.*)?$)")
NAMED = ("parameter", "buffer", "data", "accumulator")


def codes(report: ReportData) -> dict[str, str]:
    """Name to code of the two programs, as they are in the report."""
    found = {p.name: p.code for p in report.programs}
    return {name: found[name] for name in ("accumulate", "boundary") if name in found}


def readable(code: str, names: dict[str, str]) -> str:
    """names: of inputs, to the names that they are to have."""
    lines = []
    for line in code.strip().splitlines():
        text = ENDS.sub("", line).replace("torch.ops.aten.", "aten.").rstrip()
        text = re.sub(r"\b\w+\b", lambda found: names.get(found[0], found[0]), text)
        if text.startswith("def ") and len(text) > FOLD:
            head, arguments = text.split("(", 1)
            inside = arguments.removesuffix("):")
            body = textwrap.indent(textwrap.fill(f"{inside},", FOLD - 4), "    ")
            lines += [f"{head}(", *body.splitlines(), "):"]
        elif text.strip():
            lines.append(text)
    return "\n".join(lines)


def input_names(report: ReportData) -> dict[str, str]:
    """Inputs by what they hold; a name that is taken already stays away."""
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
    left, right = (readable(code, names) for code in codes(report).values())
    column = (width - SEPARATOR) // 2
    if unified or column < COLUMN:
        return _unified(left.splitlines(), right.splitlines())
    return _side_by_side(left, right)


def _unified(left: Sequence[str], right: Sequence[str]) -> RenderableType:
    styles = {"+": "green", "-": "red", "@": "cyan"}
    lines = unified_diff(left, right, "accumulate", "boundary", lineterm="")
    return Group(*(Text(line, style=styles.get(line[:1], "")) for line in lines))


def _side_by_side(left: str, right: str) -> RenderableType:
    table = Table.grid(padding=(0, SEPARATOR, 0, 0), expand=True)
    table.add_column(ratio=1, overflow="fold")
    table.add_column(ratio=1, overflow="fold")
    table.add_row(Text("accumulate", style="bold"), Text("boundary", style="bold"))
    matcher = SequenceMatcher(None, left.splitlines(), right.splitlines(), autojunk=False)
    sides = _coloured(left), _coloured(right)
    for kind, a, b, c, d in matcher.get_opcodes():
        for i in range(max(b - a, d - c)):
            row = []
            for lines, start, end, style in (
                (sides[0], a, b, "on #3f1d1d"),
                (sides[1], c, d, "on #12351f"),
            ):
                line = lines[start + i].copy() if start + i < end else Text("")
                if kind != "equal" and start + i < end:
                    line.stylize(style)
                row.append(line)
            table.add_row(*row)
    return table


def _coloured(code: str) -> Sequence[Text]:
    syntax = Syntax("", "python", theme="ansi_dark", background_color="default")
    return list(syntax.highlight(textwrap.dedent(code)).split("\n"))
