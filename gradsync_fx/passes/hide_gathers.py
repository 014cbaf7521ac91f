"""The gather of new parameters, hidden under the next call's forward.

update; start(gather); wait; p = its part     becomes     update; start(gather)           | later: wait; p = its part
forward that reads p                          becomes     arrive(p); forward that reads p

What is done later is a small graph for each gather, which the host runs when `arrive` asks for one of its parameters
(comm/arrivals.py). A gather stays where it is if anything but parameters depends on it: an average of the weights that
the step keeps, a loss after the update.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from gradsync_fx.comm.arrivals import ARRIVE
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.memory import viewed
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot, output_values
from gradsync_fx.passes.halves import Cutter
from gradsync_fx.passes.rewritten import Halves, HiddenGather, Rewritten
from gradsync_fx.passes.scatter import HIDES


_aten = torch.ops.aten
_COPY = _aten.copy_.default
# What takes the gathered values apart; anything else computes with them.
_MOVES = (_aten.reshape.default, _aten.cat.default, _aten.constant_pad_nd.default)


def arrive_before_use(rewritten: Rewritten) -> None:
    """Parameters of one bucket arrive before the first op that reads any of them; others, of another step, together."""
    graph, slots = rewritten.main.graph, rewritten.slots
    holders = dict(zip(graph.find_nodes(op="placeholder"), slots, strict=False))
    named = {slot.name: h for h, slot in holders.items() if slot.kind is Kind.PARAMETER}
    order = {node: i for i, node in enumerate(graph.nodes)}
    buckets = [[n for n in names if n in named] for names in rewritten.program.arriving]
    alone = [n for n in named if not any(n in names for names in buckets)]
    for names in [*buckets, alone] if buckets else []:
        some = [named[name] for name in names]
        users = [u for holder in some for u in holder.users]  # what is written arrives first, too
        if users:
            first = min(users, key=order.__getitem__)
            with graph.inserting_before(first):
                emit(graph, rewritten.fake_mode, ARRIVE, (some,), {})
    rewritten.main.recompile()


def hide_gathers(rewritten: Rewritten) -> None:
    """Takes what can be done later out of the second half."""
    halves = rewritten.halves
    if halves is None or halves.second is None:
        return
    while True:
        found = _next(halves, rewritten.slots)
        if found is None:
            break
        halves = found
    rewritten.halves = halves


def _next(halves: Halves, slots: tuple[Slot, ...]) -> Halves | None:
    """The halves with one gather more that is waited for later; None where no other can be."""
    second = halves.second
    assert second is not None
    known = [
        slots[i] if kind == "input" and i < len(slots) else Slot(Kind.CARRIED, "", i)
        for kind, i in halves.second_inputs
    ]
    holders = dict(zip(second.graph.find_nodes(op="placeholder"), known, strict=True))
    for wait in second.graph.find_nodes(op="call_function", target=ops.WAIT):
        if not argument(wait, 0).meta.get(HIDES):
            continue
        cutter = Cutter(second, known, [wait])
        returned = {n for n in output_values(second) if isinstance(n, Node)}
        late = cutter.second
        # The caller of a step that returns a parameter has the new one.
        returned |= {
            h
            for h, (_, i) in zip(holders, halves.second_inputs, strict=True)
            if ("input", i) in halves.results
        }
        onto = {argument(n, 0) for n in late if n.target is _COPY}
        if returned & (late | onto) or not all(_is_parameters(n, holders) for n in late):
            continue
        return _without(halves, cutter, slots)
    return None


def _is_parameters(node: Node, holders: dict[Node, Slot]) -> bool:
    if node.target is _COPY:
        slot = holders.get(argument(node, 0))
        return slot is not None and slot.kind is Kind.PARAMETER
    return node.target is ops.WAIT or node.target in _MOVES or viewed(node.target) is not None


def _without(halves: Halves, cutter: Cutter, slots: tuple[Slot, ...]) -> Halves:
    """The second half without what `cutter` takes out of it, which becomes a graph of its own."""
    cut = cutter.halves()
    assert cut.second is not None
    inputs = halves.second_inputs
    copies = cut.second.graph.find_nodes(op="call_function", target=_COPY)
    taken = list(cut.second.graph.find_nodes(op="placeholder"))
    written = [cut.second_inputs[taken.index(argument(c, 0))] for c in copies]
    hidden = HiddenGather(
        cut.second,
        tuple(inputs[i] if kind == "input" else ("second", i) for kind, i in cut.second_inputs),
        tuple((at, slots[at].name) for at in (inputs[i][1] for _, i in written)),
    )
    renamed = {i: new for i, (kind, new) in enumerate(cut.results) if kind == "first"}
    assert all(kind in ("first", "constant") for kind, _ in cut.results)
    earlier = [
        HiddenGather(
            h.module,
            tuple(
                ("second", renamed[i]) if kind == "second" else (kind, i) for kind, i in h.inputs
            ),
            h.parameters,
        )
        for h in halves.hidden
    ]
    return Halves(
        first=halves.first,
        second=cut.first,
        first_inputs=halves.first_inputs,
        second_inputs=tuple(inputs[i] for i in cut.first_inputs),
        results=tuple((k, renamed[v]) if k == "second" else (k, v) for k, v in halves.results),
        inputs=halves.inputs,
        forms=halves.forms,
        started=halves.started,
        hidden=(*earlier, hidden),
    )
