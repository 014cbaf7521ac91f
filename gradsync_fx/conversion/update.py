"""Finds an update's statements, clipping, the optimizer's step, zeroing and a scheduler's step, and what follows."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass

import libcst as cst

from gradsync_fx.conversion.names import calls_in, names_of
from gradsync_fx.conversion.source import ScriptSource, Unsure, block_of, statements


STEP, ZERO, OTHER = "step", "zero", "other"


@dataclass(frozen=True, slots=True)
class UpdateFound:
    """One update. own: its statements. after: those that follow them, of any kind. optimizer: which one steps."""

    own: tuple[cst.BaseStatement, ...]
    after: tuple[cst.BaseStatement, ...]
    optimizer: str
    zeroes: bool


def update_in(source: ScriptSource, body: Sequence[cst.BaseStatement]) -> UpdateFound:
    """The update that a block begins with. Raises `Unsure`."""
    kinds = [kind_of(source, s) for s in body]
    last = max((i for i, kind in enumerate(kinds) if kind), default=-1)
    for statement, kind in zip(body[: last + 1], kinds, strict=False):
        if kind is None:
            raise Unsure(
                statement,
                "it stands between backward and the update, and may be a part of the update",
            )
    steps = [s for s, kind in zip(body, kinds, strict=True) if kind == STEP]
    if not steps:
        raise Unsure(body[0], "no optimizer.step() is found where the update would be")
    if len(steps) > 1:
        raise Unsure(steps[1], "several optimizers step here, or one twice")
    for statement in body[last + 1 :]:
        check_harmless(source, statement)
    code = source.text(steps[0]).strip()
    (optimizer,) = source.optimizers & names_of(code).all
    return UpdateFound(tuple(body[: last + 1]), tuple(body[last + 1 :]), optimizer, ZERO in kinds)


def kind_of(source: ScriptSource, statement: cst.BaseStatement) -> str | None:
    """STEP, ZERO, OTHER where it is a part of an update; None where it is none that is known."""
    if isinstance(statement, cst.If):
        inner = {kind_of(source, s) for s in statements(block_of(statement))}
        calls = calls_in(source.short(statement.test))
        return OTHER if inner == {OTHER} and not calls and statement.orelse is None else None
    if not isinstance(statement, cst.SimpleStatementLine) or len(statement.body) != 1:
        return None
    parsed = ast.parse(source.text(statement)).body[0]
    call = parsed.value if isinstance(parsed, ast.Expr | ast.Assign) else None
    if not isinstance(call, ast.Call):
        return None
    what, _, method = ast.unparse(call.func).rpartition(".")
    given = ", ".join(ast.unparse(a) for a in [*call.args, *(k.value for k in call.keywords)])
    if method in ("clip_grad_norm_", "clip_grad_value_"):
        return OTHER
    if method == "step" and (what in source.optimizers and not given):
        return STEP
    if method == "step" and what in source.scalers and given in source.optimizers:
        return STEP
    if method == "zero_grad" and what in source.optimizers | source.models:
        return ZERO
    if method == "step" and what in source.schedulers and not given:
        return OTHER
    return OTHER if method in ("unscale_", "update") and what in source.scalers else None


def check_harmless(source: ScriptSource, statement: cst.BaseStatement) -> None:
    """Raises `Unsure` for a statement that may change what an update is made of."""
    code = source.text(statement)
    for call in calls_in(code):
        given = {a.id for a in [*call.args, *(k.value for k in call.keywords)] if hasattr(a, "id")}
        if given & source.optimizers:
            raise Unsure(statement, "the optimizer is handed to a function")
    if re.search(r"\.(grad|backward|requires_grad_?)\b", code):
        raise Unsure(statement, "it reads or makes gradients")
    if re.search(rf"\b({'|'.join(source.optimizers) or '-'})\.(step|zero_grad)\b", code):
        raise Unsure(statement, "an optimizer steps, or is zeroed, at a place that is not known")
