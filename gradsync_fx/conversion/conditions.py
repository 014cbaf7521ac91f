"""Conditions that close a window: `(i + 1) % k == 0`, with `or i + 1 == len(loader)` for what is left at the end."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

import libcst as cst

from gradsync_fx.conversion.names import canonical
from gradsync_fx.conversion.source import ScriptSource, Unsure


NUMBER = r"[A-Za-z_][\w.]*|\d+"


@dataclass(frozen=True, slots=True)
class Rounds:
    """What counts a loop's rounds. name: the variable. start: its first value. length: of the loop, as text."""

    name: str
    start: int
    length: str


def counter_of(source: ScriptSource, loop: cst.For) -> Rounds | None:
    """Of `for i, batch in enumerate(loader)` and `for i in range(n)`; None for others."""
    over = ast.parse(source.short(loop.iter), mode="eval").body
    if not (isinstance(over, ast.Call) and isinstance(over.func, ast.Name)):
        return None
    target = ast.parse(source.short(loop.target), mode="eval").body
    if over.func.id == "range" and len(over.args) == 1 and isinstance(target, ast.Name):
        return Rounds(target.id, 0, ast.unparse(over.args[0]))
    if over.func.id != "enumerate" or not isinstance(target, ast.Tuple):
        return None
    starts = [*over.args[1:], *(k.value for k in over.keywords if k.arg == "start")]
    start = ast.literal_eval(starts[0]) if starts and isinstance(starts[0], ast.Constant) else 0
    first = target.elts[0]
    if not isinstance(first, ast.Name) or start not in (0, 1) or len(starts) > 1:
        return None
    if starts and not isinstance(starts[0], ast.Constant):
        return None
    return Rounds(first.id, start, f"len({ast.unparse(over.args[0])})")


def window_of(at: cst.CSTNode, condition: str, counter: Rounds) -> tuple[str, bool]:
    """k as text, and whether the last, short window is closed, too. Raises `Unsure`."""
    parsed = ast.parse(condition, mode="eval").body
    parts = (
        parsed.values
        if isinstance(parsed, ast.BoolOp) and isinstance(parsed.op, ast.Or)
        else [parsed]
    )
    texts = [ast.unparse(p) for p in parts]
    k = _length(texts[0], counter)
    if k is None:
        raise Unsure(at, f"`{condition}` is no count of the loop's rounds that is known")
    i, end = counter.name, counter.length
    ends = {f"{i} == {end}"} if counter.start else {f"{i} + 1 == {end}", f"{i} == {end} - 1"}
    if len(texts) > 2 or (len(texts) == 2 and texts[1] not in ends):
        raise Unsure(at, f"`{condition}` asks for more than a count and the loop's end")
    return k, len(texts) == 2


def positive(condition: str) -> tuple[str, bool]:
    """A condition without its negation, and whether there was none: `a != 0 and b != 1` is not `a == 0 or b == 1`."""
    node = ast.parse(condition, mode="eval").body
    turned = _turned(node)
    return (ast.unparse(node), True) if turned is None else (canonical(ast.unparse(turned)), False)


def _turned(node: ast.expr) -> ast.expr | None:
    """The negation of a negated condition; None for one that is not negated."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return node.operand
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and isinstance(node.ops[0], ast.NotEq):
        return ast.Compare(node.left, [ast.Eq()], node.comparators)
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        parts = [_turned(v) for v in node.values]
        if all(p is not None for p in parts):
            return ast.BoolOp(ast.Or(), [p for p in parts if p is not None])
    return None


def _length(text: str, counter: Rounds) -> str | None:
    i = re.escape(counter.name)
    forms = [rf"{i} % ({NUMBER}) == 0"] if counter.start else [rf"\({i} \+ 1\) % ({NUMBER}) == 0"]
    for form in forms:
        if found := re.fullmatch(form, text):
            return found[1]
    if not counter.start and (found := re.fullmatch(rf"{i} % ({NUMBER}) == (.+)", text)):
        k = found[1]
        last = str(int(k) - 1) if k.isdecimal() else f"{k} - 1"
        return k if found[2] in (last, f"{k} - 1") else None
    return None
