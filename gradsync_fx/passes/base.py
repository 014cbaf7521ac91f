"""The shape of a pass, and the runner that applies, times and journals it, and names the one that breaks a graph.

start -> check -> pass -> pass -> ... -> proof
                                         fails: started anew, proved after each pass; the first that fails is named

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
    start: Callable[[], S],
    *context: *Context,
    proof: Callable[[S], None],
) -> S:
    """Applies the passes in order and writes the journal. The graphs are checked before the first, and after the last.

    start: makes the subject; called again where something goes wrong. context: what every pass is given beside the
    subject. proof: of the result, raises `VerificationError`. That says the first pass after which it fails, also where
    a later pass fails over what that one left.
    """
    subject = start()
    check_graphs(subject)
    try:
        for one in passes:
            before, begun = _size(subject), time.perf_counter()
            one(subject, *context)
            for module in subject.modules():
                for node in module.graph.nodes:
                    if "origin" not in node.meta:
                        node.meta.setdefault("made_by", one.__name__)  # for the report
            spent = (time.perf_counter() - begun) * 1e3
            journal.entries.append(Entry(subject.name, one.__name__, spent, before, _size(subject)))
        proof(subject)
    except Exception:
        _name_culprit(passes, start(), *context, proof=proof)
        raise
    return subject


def _name_culprit(
    passes: Sequence[Callable[[S, *Context], None]],
    subject: S,
    *context: *Context,
    proof: Callable[[S], None],
) -> None:
    """Raises the error of the first pass after which the proof fails."""
    for one in passes:
        one(subject, *context)
        try:
            proof(subject)
        except VerificationError as broken:
            raise VerificationError(
                f"{broken.culprit}, after the pass {one.__name__!r}",
                seen=broken.seen,
                wanted=broken.wanted,
                fix=broken.fix,
            ) from broken


def _size(subject: Subject) -> int:
    return sum(len(module.graph.nodes) for module in subject.modules())


def check_graphs(subject: Subject) -> None:
    """Raises `VerificationError` unless each value is made before it is read, in this graph, with a fake value."""
    for module in subject.modules():
        try:
            module.graph.lint()
        except RuntimeError as failure:
            raise _broken(subject, str(failure).splitlines()[0]) from failure
        for node in module.graph.nodes:
            if node.op == "call_function" and node.users and "val" not in node.meta:
                raise _broken(subject, f"the node {node.name} has no fake value")


def _broken(subject: Subject, seen: str) -> VerificationError:
    return VerificationError(
        f"{subject.name} program",
        seen=seen,
        wanted="a graph whose every value is made, in this graph, before it is read",
        fix="report it with the step: it is a fault of gradsync_fx",
    )
