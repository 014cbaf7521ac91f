"""The proof that lowering changed no number: what a compiler is handed does what the verified program says.

program.module                          the graph that verify.py checked, in torch's functional form
main program; waits and update kernels  what runs in its place: writes in place, buckets reduced where they lie, updates
                                        cut out and run by the host after it

Both are run on terms (symbolic.py). They are the same program if, when all has run, every input holds the same term,
every output is the same term, the same collectives were sent and each was waited for once, and the same asserts were
met. So each read of a sum, weight, parameter or state sees what the program meant it to see: none comes after the write
that ends the value, or before the wait that makes it; no write is lost, and nothing is left under way. A program has no
branches, so this holds for every run of it. Linear in the size of the graph.

What Inductor then does with a graph is torch's to answer for, but it reads aliases off the fake values: no two values
may share a storage unless one is a view of the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule
from torch.multiprocessing.reductions import StorageWeakRef

from gradsync_fx.comm.arrivals import ARRIVE
from gradsync_fx.errors import VerificationError
from gradsync_fx.ir.memory import aliased, written
from gradsync_fx.ir.ops import WAIT
from gradsync_fx.ir.program import Kind, Program, output_values
from gradsync_fx.passes.base import check_graphs
from gradsync_fx.passes.device_numbers import accelerator_of
from gradsync_fx.passes.rewritten import Halves, KernelCall, Rewritten, Wait
from gradsync_fx.passes.symbolic import Fault, Machine, Ref
from gradsync_fx.passes.terms import Term, Terms, where_they_differ


@dataclass(frozen=True, slots=True)
class _After:
    """What the host runs after the main program.

    module: None for a wait for a bucket of sums.
    inputs: positions among the program's inputs and, after these, the main program's extra outputs.
    """

    module: GraphModule | None
    inputs: tuple[int, ...]


def check_lowered(rewritten: Rewritten) -> None:
    """Raises `VerificationError` naming the input or output that ends as another value than the program says."""
    check_graphs(rewritten)
    program, main = rewritten.program, rewritten.main
    after = [_after(rewritten, call) for call in rewritten.cut.calls]
    terms = Terms(on_device=accelerator_of(program.inputs()) is not None)
    for i in rewritten.numbers:
        terms.number(terms.make("input", i))
    meant = Machine(terms)
    meant_outputs = _run(program, meant, program.module, ())
    away = [i for i, slot in enumerate(program.slots) if slot.kind is Kind.PARAMETER]
    for halves in [None] if rewritten.halves is None else [None, rewritten.halves]:
        done = Machine(terms)
        done.away.update(away if any(n.target is ARRIVE for n in main.graph.nodes) else ())
        form = main if halves is None else _InTurn(done, halves)
        outputs = _run(program, done, form, after, rewritten.numbers)
        _compare_all(program, meant, meant_outputs, done, outputs)
    for module in rewritten.modules():
        _check_storages(program, module)


class _InTurn:
    """Halves, run one after the other, and in the end what they left for later."""

    def __init__(self, machine: Machine, halves: Halves) -> None:
        self._machine, self._halves = machine, halves
        self._held: dict[str, Sequence[Any]] = {}

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        machine, halves = self._machine, self._halves
        first = machine.run(halves.first, [inputs[i] for i in halves.first_inputs])
        second: Sequence[Any] = ()
        if halves.second is not None:
            second = machine.run(halves.second, halves.given(inputs, first))
        self._held = {"input": inputs, "first": first, "second": second}
        return halves.whole(inputs, first, second)

    def end(self) -> None:
        for hidden in self._halves.hidden:
            # What was on its way before lands before this does.
            self._machine.away.difference_update(
                self._held["input"][i].root for i, _ in hidden.parameters
            )
            self._machine.run(hidden.module, [self._held[kind][i] for kind, i in hidden.inputs])


def _compare_all(
    program: Program,
    meant: Machine,
    meant_outputs: Sequence[object],
    done: Machine,
    outputs: Sequence[object],
) -> None:
    """Raises for the first thing that the two left differently."""
    count = len(program.slots)
    for slot, root in zip(program.slots, range(count), strict=True):
        _compare(program, f"{slot.kind} {slot.name!r}", meant.memory[root], done.memory[root])
    results = output_values(program.module)
    for i in range(len(results)):
        _compare(program, f"output {i}", _read(meant, meant_outputs[i]), _read(done, outputs[i]))
    _compare_counts(program, "collective", meant.sent, done.sent)
    _compare_counts(program, "wait", meant.waited, done.waited)
    _compare_counts(program, "effect", meant.effects, done.effects)


def _after(rewritten: Rewritten, call: KernelCall | Wait) -> _After:
    inputs = len(rewritten.program.slots)
    values = call.sums if isinstance(call, Wait) else (*call.tensors, *call.scalars)
    positions = tuple(v.index + (inputs if v.kind == "extra" else 0) for v in values)
    return _After(None if isinstance(call, Wait) else rewritten.updates[call.kernel], positions)


def _run(
    program: Program,
    machine: Machine,
    main: GraphModule | _InTurn,
    after: Sequence[_After],
    numbers: Sequence[int] = (),
) -> list[object]:
    inputs = [machine.bind(machine.terms.make("input", i)) for i in range(len(program.slots))]
    given = [ref for i, ref in enumerate(inputs) if i not in numbers]
    if numbers:
        elements = [machine.memory[i] for i in numbers]
        given.append(machine.bind(machine.terms.make("numbers", *elements)))
    try:
        outputs = main.run(given) if isinstance(main, _InTurn) else machine.run(main, given)
        extras = outputs[len(output_values(program.module)) :]
        held = [*inputs, *extras]
        for part in after:
            given = [held[i] for i in part.inputs]
            if part.module is None:
                machine.wait_sums(given)
            else:
                size = machine.bind(machine.terms.make("number of elements"))
                machine.run(part.module, [size, *given])
        if isinstance(main, _InTurn):
            main.end()
        machine.finish()
    except Fault as fault:
        raise _fault(program, str(fault)) from fault
    return outputs


def _read(machine: Machine, value: object) -> object:
    """An output as the caller sees it: when all has run."""
    return machine.read(value) if isinstance(value, Ref) else value


def _compare(program: Program, what: str, meant: object, done: object) -> None:
    if meant is not done and (isinstance(meant, Term) or isinstance(done, Term) or meant != done):
        there, right = where_they_differ(done, meant)
        raise _fault(program, f"{what} ends as {done}: with {there}", f"{right}")


def _compare_counts(program: Program, what: str, meant: Counter[Term], done: Counter[Term]) -> None:
    for term in meant | done:
        if meant[term] != done[term]:
            raise _fault(program, f"{done[term]} times the {what} {term}", f"{meant[term]} times")


def _may_share(target: Any) -> bool:
    """Whether a result of this op may lie in the memory of an argument."""
    return aliased(target) is not None or bool(written(target)) or target is WAIT


def _check_storages(program: Program, module: GraphModule) -> None:
    """Inductor takes two fake values of one storage for views of each other. What was traced is as torch made it."""
    owner: dict[StorageWeakRef, str] = {}
    for node in module.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or _may_share(node.target):
            continue
        storage = StorageWeakRef(value.untyped_storage())
        if storage in owner and node.op != "placeholder" and "origin" not in node.meta:
            raise _fault(
                program, f"the fake value of {node.name} shares the storage of {owner[storage]}'s"
            )
        owner[storage] = node.name


def _fault(program: Program, seen: str, wanted: str = "") -> VerificationError:
    return VerificationError(
        f"{program.name} program, in lowering",
        seen=seen,
        wanted=wanted or "what the program says before it is lowered",
        fix="report it with the step: it is a fault of gradsync_fx; without=(...) leaves out the rewrite that it is in",
    )
