"""Converts a script: a loop with a backward is rewritten whole, or left as it is, with a line and a reason."""

from __future__ import annotations

import re
from dataclasses import dataclass

import libcst as cst

from gradsync_fx.conversion.rewrite import BLANK, Rewrite, loop_rewritten
from gradsync_fx.conversion.shapes import accumulation_of
from gradsync_fx.conversion.source import ScriptSource, Unsure, every


STEP_NAMES = ("train_step", "optimized_step", "accumulated_step")


@dataclass(frozen=True, slots=True)
class Converted:
    """text: of the new script. loops: how many were rewritten. notes, left: by line, what to know and what was left."""

    text: str
    loops: int
    notes: tuple[tuple[int, str], ...]
    left: tuple[tuple[int, str], ...]


def convert(text: str) -> Converted:
    """Of a script's text. Raises `libcst.ParserSyntaxError` for what is no Python."""
    source = ScriptSource(text)
    rewrites: list[Rewrite] = []
    left: list[tuple[int, str]] = []
    names = [n for n in STEP_NAMES if not re.search(rf"\b{n}\b", text)]
    loops = _loops(source)
    for at in loops:
        try:
            if not isinstance(at, cst.For | cst.While):
                raise Unsure(
                    at, "a backward that stands in no loop: perhaps of a function that a loop calls"
                )
            if not names:
                raise Unsure(at, f"no name is free for the step: {', '.join(STEP_NAMES)}")
            made = loop_rewritten(
                source, accumulation_of(source, at), names[0], alone=len(loops) == 1
            )
        except Unsure as unsure:
            left.append((source.line(unsure.at), unsure.why))
        else:
            names.pop(0)
            rewrites.append(made)
    if not rewrites:
        return Converted(text, 0, (), tuple(left))
    module = source.module.visit(_Rewriting(rewrites))
    assert isinstance(module, cst.Module)
    notes = [note for made in rewrites for note in made.notes]
    return Converted(_importing(module).code, len(rewrites), tuple(notes), tuple(left))


def _loops(source: ScriptSource) -> list[cst.CSTNode]:
    """The innermost loop of each backward, once; a backward in no loop itself."""
    found: dict[int, cst.CSTNode] = {}
    for call in every(source.module, cst.Call):
        method = call.func.attr.value if isinstance(call.func, cst.Attribute) else ""
        if method != "backward":
            continue
        at: cst.CSTNode = call
        for node in source.around(call):
            if isinstance(node, cst.FunctionDef):
                break
            if isinstance(node, cst.For | cst.While):
                at = node
                break
        found.setdefault(id(at), at)
    return list(found.values())


class _Rewriting(cst.CSTTransformer):
    def __init__(self, rewrites: list[Rewrite]) -> None:
        super().__init__()
        self._rewrites = rewrites

    def on_leave(self, original_node, updated_node):  # type: ignore[no-untyped-def]
        found = super().on_leave(original_node, updated_node)
        for made in self._rewrites:
            if any(original_node is statement for statement in made.gone):
                return cst.RemoveFromParent()
            if original_node is made.loop:
                found = cst.FlattenSentinel(made.instead)
            if original_node is made.outer:
                found = cst.FlattenSentinel(_with_function(made, found))  # type: ignore[arg-type]
        return found


def _with_function(made: Rewrite, loop: cst.CSTNode | cst.FlattenSentinel) -> list[cst.CSTNode]:
    """The step's function, where the outermost loop began, with the comments that stood there."""
    leading = made.outer.leading_lines or BLANK  # type: ignore[attr-defined]
    function = made.function.with_changes(leading_lines=leading)
    if isinstance(loop, cst.FlattenSentinel):
        return [function, *loop, *made.behind]
    return [function, loop.with_changes(leading_lines=BLANK), *made.behind]


def _heads(statement: cst.BaseStatement) -> bool:
    """Whether it belongs to what a script begins with: its docstring and imports."""
    if not isinstance(statement, cst.SimpleStatementLine):
        return False
    first = statement.body[0]
    if isinstance(first, cst.Expr):
        return isinstance(first.value, cst.SimpleString | cst.ConcatenatedString)
    return isinstance(first, cst.Import | cst.ImportFrom)


def _importing(module: cst.Module) -> cst.Module:
    """With `import gradsync_fx` behind the imports that the script begins with, where it has none."""
    body = list(module.body)
    if any(re.match(r"import gradsync_fx\b", module.code_for_node(s).strip()) for s in body):
        return module
    at = next((i for i, s in enumerate(body) if not _heads(s)), len(body))
    return module.with_changes(
        body=[*body[:at], cst.parse_statement("import gradsync_fx"), *body[at:]]
    )
