"""Divides a micro-step: what stays before the step, what the step is, what goes behind it; and the loss's scale."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from gradsync_fx.conversion.names import calls_in, names_of, together
from gradsync_fx.conversion.source import LoopNode, ScriptSource, Statements, Unsure, every
from gradsync_fx.conversion.update import check_harmless
from gradsync_fx.conversion.window import Accumulation


SUM, MEAN = "sum", "mean"


@dataclass(frozen=True, slots=True)
class Parts:
    """front, behind: stay before and after the call. step: forward and backward. reduction: of the step."""

    front: Statements
    step: Statements
    behind: Statements
    reduction: str


def micro_step_of(source: ScriptSource, found: Accumulation, *, exact: bool) -> Parts:
    """exact: every window has k micro-steps, so their mean is what a loss divided by k sums to. Raises `Unsure`."""
    micro = list(found.micro)
    backward = [i for i, s in enumerate(micro) if re.search(r"\.backward\(", source.text(s))]
    if len(backward) != 1 or source.text(micro[backward[0]]).count(".backward(") != 1:
        raise Unsure(found.loop, "not exactly one backward in a micro-step")
    end = backward[0]
    start = next((i for i, s in enumerate(micro) if _runs_model(source, s)), None)
    if start is None or start > end:
        raise Unsure(micro[end], "the forward of a model with parameters is not found before it")
    front, step, behind = micro[:start], micro[start : end + 1], micro[end + 1 :]
    for statement in front:
        check_harmless(source, statement)
    for statement in behind:
        _check_apart(source, statement)
    _check_helpers(source, step)
    read_after = read_elsewhere(source, found, [*front, *behind])
    kept, moved = _moved(source, step)
    new, reduction, undone = _scaled(source, found, step, moved, read_after, exact=exact)
    _check_order(source, [s for s in step if s is not undone], kept, moved)
    updated = set(together(names_of(source.text(s)) for s in found.update.own).written)
    for statement in [*moved, *behind]:
        if updated & set(names_of(source.text(statement)).free):
            raise Unsure(statement, "it reads what the update before this one gave")
    return Parts(front, new, [*moved, *behind], reduction)


def _runs_model(source: ScriptSource, statement: cst.BaseStatement) -> bool:
    code = source.text(statement)
    if re.fullmatch(r"\w+\.(train|eval)\(\)\s*", code):
        return False
    return bool(source.models & names_of(code).all)


def _check_apart(source: ScriptSource, statement: cst.BaseStatement) -> None:
    """Of what comes to stand behind the step, and so behind the update: it must not use what that changes."""
    check_harmless(source, statement)
    changed = source.models | source.optimizers | source.schedulers
    if used := changed & names_of(source.text(statement)).all:
        raise Unsure(statement, f"it uses {min(used)} between backward and the update")


def _check_helpers(source: ScriptSource, step: Sequence[cst.BaseStatement]) -> None:
    """Functions of the script that the step calls."""
    own = {f.name.value: f for f in every(source.module, cst.FunctionDef)}
    for statement in step:
        for call in calls_in(source.text(statement)):
            given = {getattr(a, "id", "") for a in [*call.args, *(k.value for k in call.keywords)]}
            if given & source.optimizers:
                raise Unsure(statement, "the optimizer is handed to a function")
            helper = own.get(getattr(call.func, "id", ""))
            if helper and re.search(r"\.(backward|step|zero_grad|grad)\b", source.text(helper)):
                raise Unsure(
                    statement, f"{helper.name.value}() works on gradients or steps something"
                )
        if re.search(r"\.grad\b", source.text(statement)):
            raise Unsure(statement, "it reads gradients")
        if re.search(r"(retain|create)_graph", source.text(statement)):
            raise Unsure(statement, "a backward that keeps its graph")


def _moved(
    source: ScriptSource, step: list[cst.BaseStatement]
) -> tuple[list[cst.BaseStatement], list[cst.BaseStatement]]:
    """Without statements between forward and backward that the loss does not need: logs, sums, the next batch."""
    kept: list[cst.BaseStatement] = []
    moved: list[cst.BaseStatement] = []
    needed: set[str] = set()
    for statement in reversed(step):
        names = names_of(source.text(statement))
        if not kept or _runs_model(source, statement) or set(names.written) & needed:
            kept.insert(0, statement)
            needed |= set(names.free)
        else:
            moved.insert(0, statement)
    return kept, moved


def _check_order(
    source: ScriptSource, order: Statements, kept: Statements, moved: Statements
) -> None:
    """A statement that goes behind the step must find there what it found before. order: of all of them."""
    inside = set(together(names_of(source.text(s)) for s in kept).written)
    for statement in moved:
        names = names_of(source.text(statement))
        _check_apart(source, statement)
        later = [s for s in order[order.index(statement) + 1 :] if s in kept]
        changed = {n for s in later for n in names_of(source.text(s)).written}
        if changed & set(names.free) or inside & set(names.written):
            raise Unsure(
                statement, "it would find other values behind the step, where logs and sums go"
            )


def _scaled(
    source: ScriptSource,
    found: Accumulation,
    order: list[cst.BaseStatement],
    moved: Statements,
    read_after: set[str],
    *,
    exact: bool,
) -> tuple[list[cst.BaseStatement], str, cst.BaseStatement | None]:
    """The step with its loss as it is to be, how micro-steps then combine, and the statement that is gone.

    A division by k goes, where nothing else reads the divided loss and all windows are whole: their mean does the same.
    order: forward to backward, those among it that are moved behind the step.
    """
    step = [s for s in order if s not in moved]
    last, backward = step[-1], _parsed(source, step[-1])
    if found.accelerator:
        call = ast.unparse(backward)
        inside = re.fullmatch(rf"{found.accelerator}\.backward\((\w+)\)", call)
        if inside is None:
            raise Unsure(last, f"no plain {found.accelerator}.backward(loss)")
        code = f"{found.accelerator}.backward({inside[1]} / {found.k})"
        return [*step[:-1], _again(last, code)], SUM, None
    called = re.fullmatch(r"(.+)\.backward\(\)", ast.unparse(backward), re.DOTALL)
    loss = _undivided(called[1], found.k) if called else None
    if loss is not None:
        plain = [*step[:-1], _again(last, f"{loss}.backward()")]
        return (plain, MEAN, None) if exact else (step, SUM, None)
    for i, statement in enumerate(step[:-1]):
        parsed = _parsed(source, statement)
        text = ast.unparse(parsed)
        name, _, value = text.partition(" = ")
        itself = re.fullmatch(rf"(\w+) (?:= \1 /|/=) {re.escape(found.k)}", text)
        if itself:
            name = itself[1]
        elif (
            not (name.isidentifier() and isinstance(parsed, ast.Assign))
            or _undivided(value, found.k) is None
        ):
            continue
        at = order.index(statement)
        before = _free(source, [s for s in order[:at] if s in moved])
        after = read_after | _free(source, [s for s in order[at:] if s in moved])
        if itself and name in before and name in after:
            raise Unsure(statement, f"{name} is read before it is divided, and after")
        if exact and name not in after:
            whole = [] if itself else [_again(statement, f"{name} = {_undivided(value, found.k)}")]
            undone = statement if itself else None
            return [*step[:i], *whole, *step[i + 1 :]], MEAN, undone
        if itself and name in before:
            if called is None or called[1] != name:
                raise Unsure(statement, f"{name} is read before it is divided")
            late = _again(last, f"({name} / {found.k}).backward()")
            return [*step[:i], *step[i + 1 : -1], late], SUM, statement
        break
    return step, SUM, None


def _free(source: ScriptSource, body: Statements) -> set[str]:
    return {n for s in body for n in names_of(source.text(s)).free}


def _parsed(source: ScriptSource, statement: cst.BaseStatement) -> ast.stmt:
    return ast.parse(textwrap.dedent(source.text(statement))).body[0]


def _undivided(code: str, k: str) -> str | None:
    """What an expression divides by k, as it is to stand before a dot; None where it is no such division."""
    node = ast.parse(code, mode="eval").body
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Div):
        return None
    if ast.unparse(node.right) != k:
        return None
    plain = isinstance(node.left, ast.Name | ast.Attribute | ast.Call | ast.Subscript)
    return ast.unparse(node.left) if plain else f"({ast.unparse(node.left)})"


def _again(old: cst.BaseStatement, code: str) -> cst.BaseStatement:
    line = cst.parse_statement(code)
    assert isinstance(line, cst.SimpleStatementLine)
    return line.with_changes(leading_lines=getattr(old, "leading_lines", ()))


def read_elsewhere(
    source: ScriptSource, found: Accumulation, beside: Sequence[cst.BaseStatement]
) -> set[str]:
    """Names that others than the step read: in the function or module of the loop, or `beside` it in the loop."""
    inside = [*beside, *found.after, *found.update.after]
    names = {n for s in inside for n in names_of(source.text(s)).free}
    return names | _read_later(source, found)


def _read_later(source: ScriptSource, found: Accumulation) -> set[str]:
    """What code behind the loop reads of what the loop wrote, in the next round of a loop around it as well."""
    live: set[str] = set()
    inside: cst.CSTNode = found.loop
    for node in source.around(found.loop):
        if isinstance(node, cst.IndentedBlock | cst.Module):
            body = [s for s in node.body if s not in found.gone]
            at = body.index(inside)  # type: ignore[arg-type]
            again = body[:at] if isinstance(next(source.around(node), None), LoopNode) else []
            live |= set(together(names_of(source.text(s)) for s in [*body[at + 1 :], *again]).free)
        if isinstance(node, cst.While):
            live |= set(names_of(source.text(node.test)).free)
        if isinstance(node, cst.FunctionDef | cst.Module):
            for function in every(node, cst.FunctionDef):
                live |= set(names_of(source.text(function)).free) if function is not node else set()
            break
        if isinstance(node, cst.BaseStatement):
            inside = node
    return live
