"""The proof that programs which compute things once per window do what the step does in every call.

prologue's terms in place of held values        every write and output of the program is the plain program's
fold's terms over what one call sums early      acc + the plain program's term; of a leaf with other paths, the part
                                                that the program itself does not add

Sums commute with what is linear, so one call's proof is that of a window.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch

from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.linear import DISTRIBUTES, ZEROS
from gradsync_fx.ir.program import Kind, Program, Slot
from gradsync_fx.passes.symbolic import Machine, Ref
from gradsync_fx.passes.terms import Term, Terms
from gradsync_fx.planning.plan import Plan


_aten = torch.ops.aten
_ALLOWED = {
    "prologue": (Kind.PARAMETER, Kind.BUFFER, Kind.INVARIANT),
    "fold": (Kind.ACCUMULATOR, Kind.INVARIANT),
}


def verify_once(program: Program, plan: Plan) -> None:
    """Raises `VerificationError` unless a prologue, or a fold, reads and writes what it may, and all of it."""
    run = _Run(Terms(), program, {})
    written = {slot for slot in program.slots if run.after(slot) is not run.before(slot)}
    strange = [s for s in program.slots if s.kind not in _ALLOWED[program.name]]
    kind = Kind.INVARIANT if program.name == "prologue" else Kind.ACCUMULATOR
    wanted = {s for s in program.slots if s.kind is kind}
    if strange or written != wanted:
        named = [f"{s.kind} {s.name!r}" for s in strange or written ^ wanted]
        raise _broken(
            program, f"it reads or leaves {', '.join(named)}", "held values or sums alone"
        )
    missing = len(plan.invariants.held) - len(wanted) if kind is Kind.INVARIANT else 0
    if missing:
        raise _broken(program, f"held values not written: {missing}", "a write of each")


def prove_once(
    program: Program, plain: Program, prologue: Program, fold: Program | None, plan: Plan
) -> None:
    """Raises `VerificationError` unless program, prologue and fold together do what `plain` does.

    plan: of the whole step. fold: of the sums that the program takes early; None where it takes none.
    """
    terms = _WithZero()
    made = _Run(terms, prologue, {})
    held: dict[Slot, Term] = {s: made.after(s) for s in prologue.slots if s.kind is Kind.INVARIANT}
    early = {leaf.name for leaf in plan.invariants.sums(plan.step.leaves).values()}
    own: set[str] = set()
    if plan.closing:
        # It may add such sums to this call's terms, and do no more with them.
        held |= {s: terms.zero for s in program.slots if s.name in early}
        _check_added(program, early)
    else:
        deferred = plan.invariants.deferred
        own = {plan.step.leaves[leaf].name for group in deferred for leaf in group.others}
    meant, done = _Run(terms, plain, {}), _Run(terms, program, held)
    for slot in program.slots:
        computed = slot.kind is Kind.INVARIANT and done.after(slot) is not done.before(slot)
        if computed:
            raise _broken(
                program, f"it writes the held {slot.name!r}", "held values to be read alone"
            )
    for slot in dict.fromkeys((*plain.slots, *program.slots)):
        if slot.kind is Kind.INVARIANT or (
            slot.kind is Kind.ACCUMULATOR and slot.name in early | own
        ):
            continue
        _same(program, f"{slot.kind} {slot.name!r}", meant.after(slot), done.after(slot))
    for what in ("sent", "waited", "effects"):
        _same(program, f"what is {what}", meant.count(what), done.count(what))
    for i, pair in enumerate(zip(meant.outputs(), done.outputs(), strict=True)):
        _same(program, f"output {i}", *pair)
    if fold is not None:
        summed = {s: done.term(s) for s in program.slots if s.name in early}
        folded = _Run(terms, fold, {**held, **summed})
        sums = _Sums(terms, done.weight())
        for slot in (s for s in fold.slots if s.name in own):
            parts = sums.of(folded.term(slot))
            parts += sums.of(done.term(slot)) if slot in program.slots else Counter()
            if parts != sums.of(meant.term(slot)):
                raise _broken(
                    fold,
                    f"to {slot.name!r} it adds {folded.term(slot)}",
                    f"what a call would have added: {meant.term(slot)}",
                )


def _check_added(program: Program, early: set[str]) -> None:
    holders = program.module.graph.find_nodes(op="placeholder")
    for slot, holder in zip(program.slots, holders, strict=True):
        added = [u for u in holder.users if u.target is _aten.add.Tensor and u.args[0] is holder]
        if slot.name in early and (len(added) != 1 or len(holder.users) != 1):
            raise _broken(
                program, f"{slot.name!r} is read other than by one sum", "one addition to it"
            )


class _WithZero(Terms):
    """Terms in which a sum can be nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.zero = self.make("nothing")

    def of(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Term:
        if op is _aten.add.Tensor and not kwargs and args[0] is self.zero:
            found: Term = args[1]
            return found
        return super().of(op, args, kwargs)


class _Run:
    """A program, run on terms. Inputs of the same slot are the same term in every run. given: other terms for some."""

    def __init__(self, terms: Terms, program: Program, given: dict[Slot, Term]) -> None:
        self._machine, self._terms, self._given = Machine(terms), terms, given
        self._refs = {slot: self._machine.bind(self.before(slot)) for slot in program.slots}
        self._results = self._machine.run(program.module, list(self._refs.values()))

    def before(self, slot: Slot) -> Term:
        return self._given.get(slot) or self._terms.make("input", slot.kind, slot.key)

    def after(self, slot: Slot) -> Term:
        ref = self._refs.get(slot)
        return self.before(slot) if ref is None else self._machine.memory[ref.root]

    def term(self, slot: Slot) -> Term:
        """What is added to an accumulator."""
        before, after = self._terms.make("input", slot.kind, slot.key), self.after(slot)
        if after.op is not _aten.add.Tensor or after.args[0] is not before:
            return after
        found: Term = after.args[1]
        return found

    def weight(self) -> Term | None:
        """What weighs this call's terms."""
        slot = next((s for s in self._refs if s.kind is Kind.WEIGHT), None)
        return None if slot is None else self.term(slot)

    def count(self, what: str) -> Counter[Term]:
        found: Counter[Term] = getattr(self._machine, what)
        return found

    def outputs(self) -> list[object]:
        return [self._machine.read(r) if isinstance(r, Ref) else r for r in self._results]


class _Sums:
    """Linear values as sums of terms that are none, each with how often it is weighed by `weight`."""

    def __init__(self, terms: Terms, weight: Term | None) -> None:
        self._terms, self._weight = terms, weight

    def of(self, term: Term) -> Counter[tuple[Term, int]]:
        return Counter(self._addends(term))

    def _addends(self, term: Term) -> Iterator[tuple[Term, int]]:
        args = term.args
        if term.op is _aten.mul.Tensor and self._weight is not None and args[1] is self._weight:
            yield from ((part, n + 1) for part, n in self._addends(args[0]))
        elif term.op in (_aten.add.Tensor, _aten.sub.Tensor) and _two_terms(args):
            yield from self._addends(args[0])
            for part, n in self._addends(args[1]):
                turned = term.op is _aten.sub.Tensor
                yield (self._terms.of(_aten.neg.default, (part,), {}) if turned else part), n
        else:
            yield from self._distributed(term)

    def _distributed(self, term: Term) -> Iterator[tuple[Term, int]]:
        for i in _positions(term):
            argument = term.args[i]
            parts = list(self._addends(argument)) if isinstance(argument, Term) else []
            if parts and parts != [(argument, 0)]:
                for part, n in parts:
                    args = (*term.args[:i], part, *term.args[i + 1 :])
                    yield self._terms.of(term.op, args, {}), n
                return
        yield term, 0


def _two_terms(args: tuple[object, ...]) -> bool:
    return len(args) == 2 and all(isinstance(a, Term) for a in args)


def _positions(term: Term) -> tuple[int, ...]:
    """The arguments in which an op is linear."""
    if term.op is _aten.where.self:
        zero = [i for i in (1, 2) if _is_zero(term.args[i])]
        return (3 - zero[0],) if len(zero) == 1 else ()
    return DISTRIBUTES.get(term.op, ())


def _is_zero(value: object) -> bool:
    if not isinstance(value, Term) or value.op not in ZEROS:
        return False
    position = 0 if value.op is _aten.scalar_tensor.default else 1
    return value.args[position][1] == 0


def _same(program: Program, what: str, meant: object, done: object) -> None:
    if meant is not done and meant != done:
        raise _broken(
            program, f"{what} is {done}", f"what a call without held values leaves: {meant}"
        )


def _broken(program: Program, seen: str, wanted: str) -> VerificationError:
    return VerificationError(f"{program.name} program", seen=seen, wanted=wanted)
