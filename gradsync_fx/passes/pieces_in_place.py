"""Updates that are shared out, where ranks may reach each other's memory: sums and new parameters stay where they lie.

acc + g -> rows -> all_to_all -> wait -> add -> piece -> update; acc = 0             becomes
acc = acc + g; start_pieces(accs);  ...;  wait(accs); slice(acc) -> update; acc = 0

new piece -> all_gather -> wait -> slices -> copy_(parameter)                        becomes
new piece -> gather_pieces(parameters, new pieces)          the last of these waits for the other ranks

Whether memory is reached is known when the program runs (comm/flat_bucket.py). What fits neither form stays as it is.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.comm.inplace_pieces import GATHER_PIECES, START_PIECES
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.journal import Exchanged
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind
from gradsync_fx.passes.fuse import resets
from gradsync_fx.passes.overlap import running_sum
from gradsync_fx.passes.rewritten import Rewritten
from gradsync_fx.passes.scatter import EXCHANGE, GIVEN, LEFT, Exchange


_aten = torch.ops.aten
_COPY = _aten.copy_.default
_LAST = 4  # an argument of gather_pieces


def exchange_in_place(rewritten: Rewritten) -> None:
    """Rewrites all exchanges of pieces that fit."""
    if not rewritten.program.beside:
        return
    module = rewritten.main
    zeroed = resets(module)
    for started in [n for n in module.graph.nodes if EXCHANGE in n.meta]:
        exchange: Exchange = started.meta[EXCHANGE]
        count = len(exchange.pieces)
        given, left = (_noted(module, role, started, count) for role in (GIVEN, LEFT))
        if len(given) < count or started.meta.get("early"):
            continue
        if exchange.wire is not None:
            _sums(rewritten, started, exchange, given, left, zeroed)
        else:
            _parameters(rewritten, started, exchange, given, left)
    starts, gathers = (
        module.graph.find_nodes(op="call_function", target=op)
        for op in (START_PIECES, GATHER_PIECES)
    )
    if gathers:
        max(gathers).update_arg(_LAST, True)
    slots = dict(zip(module.graph.find_nodes(op="placeholder"), rewritten.slots, strict=False))
    rewritten.exchanged = Exchanged(
        *(
            tuple(slots[holder].name for node in nodes for holder in argument(node, 0))
            for nodes in (starts, gathers)
        )
    )
    module.recompile()


def _noted(module: GraphModule, role: str, started: Node, count: int) -> dict[int, Node]:
    """What a collective is given, or what it leaves, by number; only what is still there."""
    name = started.meta[EXCHANGE].name
    found = {n.meta[role][name]: n for n in module.graph.nodes if name in n.meta.get(role, ())}
    return {i: found[i] for i in range(count) if i in found}


def _sums(
    rewritten: Rewritten,
    started: Node,
    exchange: Exchange,
    terms: dict[int, Node],
    pieces: dict[int, Node],
    zeroed: dict[Node, Node],
) -> None:
    graph, fake_mode = rewritten.main.graph, rewritten.fake_mode
    holders: list[Node] = []
    for i, portion in enumerate(exchange.pieces):
        holder = running_sum(terms[i], zeroed)
        if holder is None or not _fits(holder, portion.elements) or holder in holders:
            return
        holders.append(holder)
    for i, holder in enumerate(holders):
        if terms[i] is not holder:
            with graph.inserting_after(terms[i]):
                copy = graph.call_function(_COPY, (holder, terms[i]))
            copy.meta["val"] = holder.meta["val"]
    group = argument(started, len(started.args) - 1)
    (waited,) = started.users
    with graph.inserting_before(started):
        given = (holders, group, exchange.wire, *_numbers(exchange))
        emit(graph, fake_mode, START_PIECES, given, {})
    with graph.inserting_before(waited):
        wait = emit(graph, fake_mode, WAIT_SUMS, (holders,), {})
        wait.meta["early"] = False
        for i, piece in pieces.items():
            start, end = exchange.pieces[i].of(exchange.rank)
            flat = emit(graph, fake_mode, _aten.view.default, (holders[i], [-1]), {})
            own = emit(graph, fake_mode, _aten.slice.Tensor, (flat, 0, start, end), {})
            piece.replace_all_uses_with(own)
    _erase_between(graph, pieces.values(), terms.values(), started)


def _parameters(
    rewritten: Rewritten,
    started: Node,
    exchange: Exchange,
    pieces: dict[int, Node],
    new: dict[int, Node],
) -> None:
    graph = rewritten.main.graph
    slots = dict(zip(graph.find_nodes(op="placeholder"), rewritten.slots, strict=False))
    copies: list[Node] = []
    for i, portion in enumerate(exchange.pieces):
        readers: list[Any] = list(new[i].users) if i in new else []
        if len(readers) != 1 or readers[0].target is not _COPY or readers[0].users:
            return
        holder = argument(readers[0], 0)
        slot = slots.get(holder)
        if slot is None or slot.kind is not Kind.PARAMETER or not _fits(holder, portion.elements):
            return
        copies.append(readers[0])
    holders: list[Node] = [argument(copy, 0) for copy in copies]
    if len({*holders}) < len(holders):
        return
    names = "\n".join(slots[holder].name for holder in holders)
    group = argument(started, len(started.args) - 1)
    own = [pieces[i] for i in range(len(holders))]
    # Right after the update, while its results are in the cache; unless somebody reads what parameters were before it.
    made = max(own)
    later = any(u > made for holder in holders for u in holder.users if u not in copies)
    with graph.inserting_before(max(copies)) if later else graph.inserting_after(made):
        given = (holders, own, names, group, False, *_numbers(exchange))
        emit(graph, rewritten.fake_mode, GATHER_PIECES, given, {})
    for copy in copies:
        graph.erase_node(copy)
    _erase_between(graph, new.values(), pieces.values(), started)


def _numbers(exchange: Exchange) -> tuple[list[int], int]:
    """As the ops are told whose the pieces are."""
    return [cut for portion in exchange.pieces for cut in portion.cuts], exchange.rank


def _fits(holder: Node, elements: int) -> bool:
    form = holder.meta["val"]
    return bool(
        form.device.type == "cpu"
        and not form.is_complex()
        and form.is_contiguous()
        and form.numel() == elements > 0
    )


def _erase_between(
    graph: Any, ends: Collection[Node], starts: Collection[Node], started: Node
) -> None:
    """Takes a collective out, with all that only it needed, and all that only took its result apart."""
    stack: list[Node] = [*ends, started]
    between: set[Node] = set()
    while stack:
        node = stack.pop()
        if node not in between and node not in starts and node.op == "call_function":
            between.add(node)
            stack += node.all_input_nodes
    for node in reversed(list(graph.nodes)):
        if node in between and not node.users:
            graph.erase_node(node)
