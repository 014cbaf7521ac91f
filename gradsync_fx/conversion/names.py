"""Which names a piece of code reads and writes, and how an expression is written without its spaces and brackets."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeGuard


@dataclass(frozen=True, slots=True)
class Names:
    """Of one statement. free: read before anything in it wrote them. written: in it, perhaps. surely: in every way."""

    free: tuple[str, ...]
    written: tuple[str, ...]
    surely: tuple[str, ...]

    @property
    def all(self) -> set[str]:
        """Read or written."""
        return {*self.free, *self.written}


def canonical(code: str) -> str:
    """An expression as ast writes it: equal ones have equal texts, whatever their spaces and brackets."""
    return ast.unparse(ast.parse(textwrap.dedent(code).strip(), mode="eval"))


def names_of(code: str) -> Names:
    """Of the text of a statement, or of several."""
    free: dict[str, None] = {}
    written: dict[str, None] = {}
    surely = _run(ast.parse(textwrap.dedent(code)).body, free, written, set())
    return Names(tuple(free), tuple(written), tuple(n for n in written if n in surely))


def together(parts: Iterable[Names]) -> Names:
    """Of statements one after the other."""
    free: dict[str, None] = {}
    written: dict[str, None] = {}
    surely: dict[str, None] = {}
    for part in parts:
        free |= dict.fromkeys(n for n in part.free if n not in surely)
        written |= dict.fromkeys(part.written)
        surely |= dict.fromkeys(part.surely)
    return Names(tuple(free), tuple(written), tuple(surely))


def calls_in(code: str) -> list[ast.Call]:
    """All calls in the text of statements."""
    return [n for n in ast.walk(ast.parse(textwrap.dedent(code))) if isinstance(n, ast.Call)]


def _run(
    body: Sequence[ast.stmt], free: dict[str, None], written: dict[str, None], known: set[str]
) -> set[str]:
    """Follows statements in their order; returns what is surely written after them."""
    for statement in body:
        if isinstance(statement, ast.With):
            for item in statement.items:
                _expression(item, free, written, known)
            known = _run(statement.body, free, written, known)
        elif isinstance(statement, ast.If):
            _expression(statement.test, free, written, known)
            ways = [_run(b, free, written, set(known)) for b in (statement.body, statement.orelse)]
            known = ways[0] & ways[1]
        elif isinstance(statement, ast.For | ast.While):
            _expression(
                statement.iter if isinstance(statement, ast.For) else statement.test,
                free, written, known,
            )  # fmt: skip
            inside = set(known)
            if isinstance(statement, ast.For):
                _expression(statement.target, free, written, inside)
            _run([*statement.body, *statement.orelse], free, written, inside)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef):
            inner = {
                a.arg for n in ast.walk(statement) if isinstance(n, ast.arguments) for a in n.args
            }
            own = inner | {n.id for n in ast.walk(statement) if _is_store(n)}
            read = [n.id for n in ast.walk(statement) if isinstance(n, ast.Name)]
            free |= dict.fromkeys(n for n in read if n not in own | known)
            written[statement.name] = None
            known = known | {statement.name}
        else:
            _expression(statement, free, written, known)
    return known


def _expression(
    node: ast.AST, free: dict[str, None], written: dict[str, None], known: set[str]
) -> None:
    """All of a simple statement or an expression: what it reads, then what it writes."""
    inner = {
        name.id
        for part in ast.walk(node)
        if isinstance(part, ast.comprehension)
        for name in ast.walk(part.target)
        if isinstance(name, ast.Name)
    }
    inner |= {
        a.arg for part in ast.walk(node) if isinstance(part, ast.Lambda) for a in part.args.args
    }
    names = [n for n in ast.walk(node) if isinstance(n, ast.Name) and n.id not in inner]
    names.sort(key=lambda n: (n.lineno, n.col_offset))
    again = [name for n in ast.walk(node) for name in _augmented(n)]
    read = [n.id for n in names if not _is_store(n)] + again
    free |= dict.fromkeys(n for n in read if n not in known)
    stored = [n.id for n in names if _is_store(n)]
    stored += [
        (alias.asname or alias.name).partition(".")[0]
        for n in ast.walk(node)
        if isinstance(n, ast.Import | ast.ImportFrom)
        for alias in n.names
    ]
    written |= dict.fromkeys(stored)
    known |= set(stored)


def _is_store(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)


def _augmented(node: ast.AST) -> list[str]:
    """What is read by being changed."""
    target = node.target if isinstance(node, ast.AugAssign) else None
    return [target.id] if isinstance(target, ast.Name) else []
