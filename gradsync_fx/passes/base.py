"""The shape of a pass, and the runner that checks, applies, times and journals it.

A pass edits a subject in place: a `Draft` (before lowering), or a `Rewritten` (in it).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar, TypeVarTuple

from torch.fx import GraphModule

from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.journal import Entry, Journal
from gradsync_fx.passes.rewritten import Rewritten
from gradsync_fx.planning.plan import Plan


class Subject(Protocol):
    """What passes work on: graphs under the name of a program."""

    @property
    def name(self) -> str: ...

    def modules(self) -> list[GraphModule]: ...


S = TypeVar("S", bound=Subject)
Context = TypeVarTuple("Context")
Pass = Callable[[Draft, Plan], None]
LoweringPass = Callable[[Rewritten], None]


def run_passes(
    passes: Sequence[Callable[[S, *Context], None]],
    journal: Journal,
    subject: S,
    *context: *Context,
) -> None:
    """Applies the passes in order and writes the journal. The graphs are checked before the first, and after the last.

    context: what every pass is given beside the subject.
    """
    _check(subject, "before its passes")
    for one in passes:
        before, start = _size(subject), time.perf_counter()
        one(subject, *context)
        for module in subject.modules():
            for node in module.graph.nodes:
                if "origin" not in node.meta:
                    node.meta.setdefault("made_by", one.__name__)  # for the report
        spent = (time.perf_counter() - start) * 1e3
        journal.entries.append(Entry(subject.name, one.__name__, spent, before, _size(subject)))
    _check(subject, f"after its passes ({', '.join(p.__name__ for p in passes)})")


def _size(subject: Subject) -> int:
    return sum(len(module.graph.nodes) for module in subject.modules())


def _check(subject: Subject, when: str) -> None:
    """Raises `VerificationError` unless each value is made before it is read, in this graph, and its form is known."""
    for module in subject.modules():
        try:
            module.graph.lint()
        except RuntimeError as failure:
            raise _broken(subject, when, str(failure).splitlines()[0]) from failure
        for node in module.graph.nodes:
            if node.op == "call_function" and node.users and "val" not in node.meta:
                raise _broken(subject, when, f"the node {node.name} has no fake value")


def _broken(subject: Subject, when: str, seen: str) -> VerificationError:
    return VerificationError(
        f"{subject.name} program, {when}",
        seen=seen,
        wanted="a graph whose every value is made, in this graph, before it is read",
        fix="report it with the step: it is a fault of gradsync_fx",
    )
