"""Buckets where each rank updates its pieces alone: sums go to who needs them, new parameters back to everybody.

terms of the bucket -> for each rank its pieces, one behind the other -> all_to_all -> wait -> terms of all ranks, added
                                                                                              in rank order -> pieces
new pieces          -> one behind the other -> all_gather -> wait -> every rank's pieces -> parameters

What rank r is sent, its share: of each parameter that is split its piece, padded to the longest rank's, then the
parameters that r has whole. A term is rounded to the wire's dtype once, and added in its own.

Nodes are the same ones on all ranks, with other sizes: collectives come in the order of the graph, which has to be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.fx import Node

from gradsync_fx.comm.scattered_bucket import MOST_PADDING
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import Draft
from gradsync_fx.optim.shares import Portion
from gradsync_fx.passes.sums import as_pairs, cast, shaped


_aten = torch.ops.aten
ALL_TO_ALL, ALL_GATHER = ops.ALL_TO_ALL, ops.ALL_GATHER
REDUCE_SCATTER = torch.ops._c10d_functional.reduce_scatter_tensor.default
# Up to so many terms are added one by one; more by a sum over a dimension.
ONE_BY_ONE = 8
HIDES = "hides"  # of a node's meta: a gather of new parameters that may be waited for later


# Of metas, for the lowering. Of a collective of pieces: what it stands for. Of what it is given, and of what it leaves:
# by the name of the collective, the number of the piece.
EXCHANGE, GIVEN, LEFT = "exchange", "given", "left"


@dataclass(frozen=True, slots=True)
class Exchange:
    """What a collective of pieces stands for. name: of its node, when it was made. wire: the dtype of terms of sums on
    their way; None for new parameters.
    """

    name: str
    pieces: tuple[Portion, ...]
    world: int
    rank: int
    wire: torch.dtype | None = None


class Ranks(Protocol):
    """How many ranks there are, and which one this is."""

    @property
    def world(self) -> int: ...

    @property
    def rank(self) -> int: ...


def _note(started: Node, exchange: Exchange, given: Sequence[Node], left: Sequence[Node]) -> None:
    started.meta[EXCHANGE] = exchange
    for role, nodes in ((GIVEN, given), (LEFT, left)):
        for i, node in enumerate(nodes):
            node.meta[role] = {**node.meta.get(role, {}), exchange.name: i}


class Layout:
    """Pieces of some parameters of one dtype, as they lie in each rank's share. factor: numbers in an element."""

    def __init__(self, pieces: Sequence[Portion], world: int, factor: int = 1) -> None:
        self.pieces, self.world, self.factor = list(pieces), world, factor
        self.split = [i for i, p in enumerate(pieces) if p.owner is None]
        self.whole = [i for i, p in enumerate(pieces) if p.owner is not None]
        self.rows = {
            i: pieces[i].size(0) * factor for i in self.split
        }  # the longest is the first rank's
        self.columns = sum(self.rows.values())

    def owned(self, rank: int) -> list[int]:
        return [i for i in self.whole if self.pieces[i].owner == rank]

    def length(self, rank: int) -> int:
        """Of a rank's share."""
        return self.columns + sum(self.numel(i) for i in self.owned(rank))

    def lengths(self) -> list[int]:
        return [self.length(rank) for rank in range(self.world)]

    def numel(self, i: int) -> int:
        return self.pieces[i].elements * self.factor

    def starts(self, rank: int) -> dict[int, int]:
        """Where each piece lies in the share of a rank."""
        found, start = {}, 0
        for i in self.split:
            found[i], start = start, start + self.rows[i]
        for i in self.owned(rank):
            found[i], start = start, start + self.numel(i)
        return found


def scatter(
    draft: Draft,
    plan: Ranks,
    pieces: Sequence[Portion],
    terms: Sequence[Node],
    op: str,
    group: str,
    wire_dtype: torch.dtype,
) -> list[Node]:
    """This rank's piece of the sum of each term over the ranks, flat, in the term's dtype; empty where it has none.

    Goes where the builder inserts. terms: real, or views of complex ones as pairs of real numbers.
    """
    factors = {
        t.meta["val"].numel() // p.elements
        for p, t in zip(pieces, terms, strict=True)
        if p.elements
    }
    layout = Layout(pieces, plan.world, max(factors, default=1))
    dtype, mine = terms[0].meta["val"].dtype, layout.length(plan.rank)
    flat = _sent(draft, layout, [cast(draft, t, wire_dtype) for t in terms])
    lengths = layout.lengths()
    even = len(set(lengths)) == 1
    if even and wire_dtype is dtype and flat.meta["val"].device.type == "cuda":
        form = draft.form(flat.meta["val"], shape=[mine])
        started = draft.call_known(form, REDUCE_SCATTER, flat, op, plan.world, group)
        started.meta["bucket"], started.meta["early"] = True, False
        total = draft.call_known(draft.form(form), ops.WAIT, started)
    else:
        form = draft.form(flat.meta["val"], shape=[mine * plan.world])
        split = [mine] * plan.world
        started = draft.call_known(form, ALL_TO_ALL, flat, split, lengths, group)
        started.meta["bucket"], started.meta["early"] = True, False
        waited = draft.call_known(draft.form(form), ops.WAIT, started)
        total = _added(draft, waited, mine, plan.world, dtype)
        if op == "avg":
            form = draft.form(total.meta["val"])
            total = draft.call_known(form, _aten.div.Tensor, total, plan.world)
    starts = layout.starts(plan.rank)
    found = []
    for i, piece in enumerate(pieces):
        size = piece.size(plan.rank) * layout.factor
        found.append(_cut(draft, total, starts.get(i, 0), size))
    if op == "sum":
        exchange = Exchange(started.name, tuple(pieces), plan.world, plan.rank, wire_dtype)
        _note(started, exchange, terms, found)
    return found


def _sent(draft: Draft, layout: Layout, terms: list[Node]) -> Node:
    """Every rank's share, in the order of ranks."""
    lines = [_flat(draft, t) for t in terms]
    rows = [_rows(draft, lines[i], layout.rows[i], layout.world) for i in layout.split]
    table = _joined(draft, rows, dim=1) if rows else None
    if not layout.whole and table is not None:
        return _flat(draft, table)
    shares = []
    for rank in range(layout.world):
        if table is not None:
            form = draft.form(table.meta["val"], shape=[layout.columns])
            shares.append(draft.call_known(form, _aten.select.int, table, 0, rank))
        shares += [lines[i] for i in layout.owned(rank)]
    return _joined(draft, shares, dim=0)


def _added(draft: Draft, waited: Node, length: int, world: int, dtype: torch.dtype) -> Node:
    """The terms of all ranks, in rank order."""
    if world > ONE_BY_ONE:
        value = waited.meta["val"]
        table = draft.call_known(
            draft.form(value, shape=[world, length]), _aten.reshape.default, waited, [world, length]
        )
        form = draft.form(value, shape=[length], dtype=dtype)
        return draft.call_known(form, _aten.sum.dim_IntList, table, [0], dtype=dtype)
    total = cast(draft, _cut(draft, waited, 0, length), dtype)
    for rank in range(1, world):
        term = cast(draft, _cut(draft, waited, rank * length, length), dtype)
        total = draft.call_known(draft.form(term.meta["val"]), _aten.add.Tensor, total, term)
    return total


def gather(
    draft: Draft,
    plan: Ranks,
    pieces: Sequence[Portion],
    mine: Sequence[Node],
    forms: Sequence[torch.Tensor],
    group: str,
    *,
    hides: bool = False,
) -> list[Node]:
    """What all ranks' pieces make together, in these forms, all of one dtype. mine: this rank's, empty where it has
    none: so the gather comes, on every rank, after what the others' wait for. hides: it may end in the next call.

    Goes where the builder inserts.
    """
    like = forms[0]
    factor = 2 if like.is_complex() else 1
    layout = Layout(pieces, plan.world, factor)
    lengths = layout.lengths()
    longest = max(lengths)
    lines = [_flat(draft, as_pairs(draft, own)) for own in mine]
    parts = [
        _padded(draft, lines[i], layout.rows[i])
        if layout.numel(i) < layout.rows[i] * plan.world
        else lines[i]
        for i in layout.split
    ]
    parts += [lines[i] for i in layout.whole]
    dtype = like.dtype.to_real()
    share = _joined(draft, parts, dim=0)
    if longest * plan.world <= MOST_PADDING * sum(lengths):
        if longest * plan.world > sum(lengths):
            share = _padded(draft, share, longest)
        form = draft.form(like, shape=[longest * plan.world], dtype=dtype)
        started = draft.call_known(form, ALL_GATHER, share, plan.world, group)
        begins = [rank * longest for rank in range(plan.world)]
    else:  # a copy for each rank
        sent = _joined(draft, [share] * plan.world, dim=0)
        form = draft.form(like, shape=[sum(lengths)], dtype=dtype)
        split = [lengths[plan.rank]] * plan.world
        started = draft.call_known(form, ALL_TO_ALL, sent, lengths, split, group)
        begins = [sum(lengths[:rank]) for rank in range(plan.world)]
    started.meta[HIDES] = hides
    waited = draft.call_known(draft.form(form), ops.WAIT, started)
    table, start = _table(draft, layout, waited, begins), 0
    found: dict[int, Node] = {}
    for i in layout.split:
        form = draft.form(like, shape=[plan.world, layout.rows[i]], dtype=dtype)
        end = start + layout.rows[i]
        rows = draft.call_known(form, _aten.slice.Tensor, table, 1, start, end)
        found[i], start = _cut(draft, _flat(draft, rows), 0, layout.numel(i)), end
    for rank in range(plan.world):
        places = layout.starts(rank)
        for i in layout.owned(rank):
            found[i] = _cut(draft, waited, begins[rank] + places[i], layout.numel(i))
    new = [shaped(draft, found[i], value) for i, value in enumerate(forms)]
    if not hides:
        _note(started, Exchange(started.name, tuple(pieces), plan.world, plan.rank), mine, new)
    return new


def _table(draft: Draft, layout: Layout, waited: Node, begins: list[int]) -> Node | None:
    """What came of the parameters that are split, with a row for each rank."""
    if not layout.split:
        return None
    world, columns = layout.world, layout.columns
    value = waited.meta["val"]
    length = value.numel() // world
    if begins == [rank * length for rank in range(world)]:
        return _rows(draft, waited, length, world)
    rows = [_cut(draft, waited, begin, columns) for begin in begins]
    return _rows(draft, _joined(draft, rows, dim=0), columns, world)


def own_piece(draft: Draft, plan: Ranks, piece: Portion, whole: Node) -> Node:
    """This rank's piece of a tensor that every rank has, flat."""
    start, end = piece.of(plan.rank)
    return _cut(draft, _flat(draft, whole), start, end - start)


def _flat(draft: Draft, node: Node) -> Node:
    value = node.meta["val"]
    if value.dim() == 1:
        return node
    form = draft.form(value, shape=[value.numel()])
    return draft.call_known(form, _aten.reshape.default, node, [-1])


def _cut(draft: Draft, line: Node, start: int, size: int) -> Node:
    form = draft.form(line.meta["val"], shape=[size])
    return draft.call_known(form, _aten.slice.Tensor, line, 0, start, start + size)


def _padded(draft: Draft, line: Node, size: int) -> Node:
    value = line.meta["val"]
    form = draft.form(value, shape=[size])
    return draft.call_known(form, _aten.constant_pad_nd.default, line, [0, size - value.numel()])


def _rows(draft: Draft, line: Node, columns: int, world: int) -> Node:
    """A flat tensor as a table with a row for each rank."""
    padded = line
    if line.meta["val"].numel() < columns * world:
        padded = _padded(draft, line, columns * world)
    form = draft.form(line.meta["val"], shape=[world, columns])
    return draft.call_known(form, _aten.reshape.default, padded, [world, columns])


def _joined(draft: Draft, nodes: list[Node], dim: int) -> Node:
    if len(nodes) == 1:
        return nodes[0]
    value = nodes[0].meta["val"]
    shape = list(value.shape)
    shape[dim] = sum(n.meta["val"].shape[dim] for n in nodes)
    return draft.call_known(draft.form(value, shape=shape), _aten.cat.default, nodes, dim)
