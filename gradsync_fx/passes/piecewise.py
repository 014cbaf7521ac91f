"""What reads gradients between their reduction and the update, where each rank has a piece of each: on the pieces.

g * clip, g + wd * p          on the piece, and on that piece of what every rank has whole
norm(g), sum(g), max(|g|)     of the piece; then ONE gather of all such numbers of all ranks, which every rank combines
                              in the same order
optimizer.step                is given the piece (update.py)
anything else                 the whole gradient, gathered

So a norm over all gradients is that of the whole gradient, and the same number on every rank.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.dataflow import downstream
from gradsync_fx.ir.ops import argument
from gradsync_fx.optim.shares import Portion
from gradsync_fx.passes.scatter import ALL_GATHER, gather, own_piece
from gradsync_fx.passes.sums import cast, filled
from gradsync_fx.planning.plan import Plan


_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
# Results lie in the order of their argument's elements.
_SAME_ORDER = frozenset(
    {
        _aten.view.default,
        _aten.reshape.default,
        _aten._unsafe_view.default,
        _aten.alias.default,
        _aten.detach.default,
        _aten.clone.default,
        _aten.unsqueeze.default,
        _aten.squeeze.default,
        _aten.squeeze.dim,
        _aten.squeeze.dims,
    }
)
_CASTS = (_CAST, _aten._to_copy.default)
_NORMS = (_aten.linalg_vector_norm.default, _aten.norm.Scalar, _aten.norm.ScalarOpt_dim)


@dataclass(frozen=True, slots=True)
class _Partial:
    """A number made of all elements of a gradient. kind: how ranks' numbers become one. node: what it stands for."""

    node: Node
    value: Node
    kind: str
    order: float


@dataclass(slots=True)
class _Readers:
    """Rewrites all that reads gradients. pieces: by the node that stood for the whole gradient."""

    draft: Draft
    plan: Plan
    group: str
    pieces: dict[Node, tuple[Node, Portion]]
    _lists: dict[Node, list[Node]] = field(default_factory=dict)
    _list_pieces: dict[Node, list[Portion | None]] = field(default_factory=dict)
    _whole: dict[Node, Node] = field(default_factory=dict)

    def rewrite(self) -> None:
        """Readers in the order of the program; what needs a number of all ranks waits for the gather of those."""
        done: set[Node] = set()
        while True:
            self.draft.sort()
            live = self.draft.live()
            pending: list[_Partial] = []
            blocked: set[Node] = set()
            for node in list(self.draft.graph.nodes):
                if node in done or node in blocked or node not in live:
                    continue
                if not any(n in self.pieces or n in self._lists for n in node.all_input_nodes):
                    continue
                done.add(node)
                found = self._read(node)
                if found:
                    pending += found
                    blocked = downstream([p.node for p in pending])
            if not pending:
                break
            self._combine(pending)
        self.draft.sort()

    def _read(self, node: Node) -> list[_Partial]:
        """Puts what does the same with pieces in its place; returns the numbers that need all ranks first."""
        target: Any = node.target
        if target is ops.UPDATE:
            grads = [self.pieces[g][0] if g in self.pieces else g for g in argument(node, 3)]
            self._give_whole([p for p in argument(node, 2) if p in self.pieces], node)
            node.update_arg(3, grads)
            return []
        if target is operator.getitem and argument(node, 0) in self._lists:
            self._take(node)
            return []
        if target is _aten._foreach_norm.Scalar:
            return self._norms(node)
        if str(target).startswith("aten._foreach_") and self._listed(node):
            return []
        if target in _SAME_ORDER:
            self.pieces[node] = self.pieces[argument(node, 0)]
            return []
        if self._is_elementwise(node):
            self._elementwise(node)
            return []
        partial = self._partial(node)
        if partial is not None:
            return [partial]
        self._give_whole(node.all_input_nodes, node)
        return []

    def _is_elementwise(self, node: Node) -> bool:
        tags, value = getattr(node.target, "tags", ()), node.meta.get("val")
        random = torch.Tag.nondeterministic_seeded in tags
        if not isinstance(value, torch.Tensor) or not value.dim():
            return False
        if not (node.target in _CASTS or (torch.Tag.pointwise in tags and not random)):
            return False
        return self._same_pieces(node.all_input_nodes, value.shape) is not None

    def _same_pieces(self, nodes: Sequence[Node], shape: torch.Size) -> Portion | None:
        """The one way in which these are divided; None where they do not lie element by element beside each other."""
        held = [self.pieces[n][1] for n in nodes if n in self.pieces]
        values = [n.meta["val"] for n in nodes]
        alike = all(
            isinstance(v, torch.Tensor)
            and (v.shape == shape or (n not in self.pieces and not v.dim()))
            for n, v in zip(nodes, values, strict=True)
            if not isinstance(v, int | float | torch.SymInt | torch.SymFloat)
        )
        return held[0] if held and alike and all(p == held[0] for p in held) else None

    def _elementwise(self, node: Node) -> None:
        piece = self._same_pieces(node.all_input_nodes, node.meta["val"].shape)
        assert piece is not None
        inputs = [self.pieces[n][0] if n in self.pieces else n for n in node.all_input_nodes]
        with self.draft.after(*inputs):
            own = {n: self._own(n, piece) for n in node.all_input_nodes}
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), own.__getitem__)
            kwargs = {k: v for k, v in kwargs.items() if k != "memory_format"}
            form = self._form(piece, node.meta["val"])
            self.pieces[node] = (self.draft.call_known(form, node.target, *args, **kwargs), piece)  # type: ignore[arg-type]

    def _own(self, node: Node, piece: Portion) -> Node:
        """This rank's piece; a number is itself."""
        if node in self.pieces:
            return self.pieces[node][0]
        value = node.meta["val"]
        if not isinstance(value, torch.Tensor) or not value.dim():
            return node
        return own_piece(self.draft, self.plan, piece, node)

    def _form(self, piece: Portion, like: torch.Tensor) -> torch.Tensor:
        return self.draft.form(like, shape=[piece.size(self.plan.rank)])

    def _listed(self, node: Node) -> bool:
        """An op of many tensors, element by element: with the pieces in its lists. False where that is not it."""
        results = node.meta["val"]
        given: Any = node.args
        lists = [a for a in given if isinstance(a, list | tuple) and a and isinstance(a[0], Node)]
        single = [a for a in given if isinstance(a, Node) and a.meta["val"].dim()]
        if node.kwargs or single or any(len(a) != len(results) for a in lists):
            return False
        pieces: list[Portion | None] = []
        for i, result in enumerate(results):
            beside = [a[i] for a in lists]
            if not any(n in self.pieces for n in beside):
                pieces.append(None)
                continue
            piece = self._same_pieces(beside, result.shape)
            if piece is None or not result.dim():
                return False
            pieces.append(piece)
        inputs = [self.pieces[n][0] if n in self.pieces else n for n in node.all_input_nodes]
        with self.draft.after(*inputs):
            args = [
                [n if p is None else self._own(n, p) for n, p in zip(a, pieces, strict=True)]
                if any(a is one for one in lists)
                else a
                for a in given
            ]
            forms = [
                self.draft.form(v) if p is None else self._form(p, v)
                for v, p in zip(results, pieces, strict=True)
            ]
            many = self.draft.call_known(forms, node.target, *args)  # type: ignore[arg-type]
            self._lists[node] = [
                self.draft.call_known(form, operator.getitem, many, i)
                for i, form in enumerate(forms)
            ]
        self._list_pieces[node] = pieces
        return True

    def _take(self, item: Node) -> None:
        many, i = argument(item, 0), argument(item, 1)
        value, piece = self._lists[many][i], self._list_pieces[many][i]
        if piece is None:
            item.replace_all_uses_with(value)
        else:
            self.pieces[item] = (value, piece)

    def _norms(self, node: Node) -> list[_Partial]:
        """A norm of many tensors at once, each by itself; those of whole tensors stay together."""
        given = argument(node, 0)
        order = float(node.args[1]) if len(node.args) > 1 else 2.0  # type: ignore[arg-type]
        found = []
        for item in [u for u in node.users if u.target is operator.getitem]:
            source = given[argument(item, 1)]
            if source in self.pieces:
                found.append(self._norm(item, source, order))
            else:
                form = self.draft.form(item.meta["val"])
                with self.draft.after(source):
                    norms = self.draft.call_known(
                        [form], _aten._foreach_norm.Scalar, [source], order
                    )
                    value = self.draft.call_known(form, operator.getitem, norms, 0)
                item.replace_all_uses_with(value)
        return found

    def _partial(self, node: Node) -> _Partial | None:
        """One number of all elements of one gradient."""
        source = node.args[0] if node.args else None
        value = node.meta.get("val")
        if not isinstance(source, Node) or node.all_input_nodes != [source]:
            return None
        if not isinstance(value, torch.Tensor) or value.dim() or value.is_complex():
            return None
        if node.target in _NORMS:
            order = node.args[1] if len(node.args) > 1 else 2.0
            return self._norm(node, source, 2.0 if order is None else float(order))  # type: ignore[arg-type]
        kinds: dict[Any, str] = {
            _aten.sum.default: "sum",
            _aten.sum.dim_IntList: "sum",
            _aten.max.default: "max",
            _aten.amax.default: "max",
            _aten.min.default: "min",
            _aten.amin.default: "min",
        }
        kind = kinds.get(node.target)
        if kind is None or not value.is_floating_point():
            return None
        piece, _ = self.pieces[source]
        with self.draft.after(piece):
            wide = cast(self.draft, piece, _wide(piece.meta["val"].dtype, value.dtype))
            return _Partial(node, self._reduced(wide, kind), kind, 1.0)

    def _norm(self, node: Node, source: Node, order: float) -> _Partial:
        piece, _ = self.pieces[source]
        value, call = piece.meta["val"], self.draft.call
        with self.draft.after(piece):
            if value.is_complex():
                piece = call(_aten.abs.default, piece)
            wide = cast(self.draft, piece, _wide(piece.meta["val"].dtype, node.meta["val"].dtype))
            if order == 2.0:
                return _Partial(
                    node, self._reduced(call(_aten.mul.Tensor, wide, wide), "sum"), "sum", 2.0
                )
            if order == 0.0:
                some = cast(self.draft, call(_aten.ne.Scalar, wide, 0.0), wide.meta["val"].dtype)
                return _Partial(node, self._reduced(some, "sum"), "sum", 1.0)
            size = call(_aten.abs.default, wide)
            if abs(order) == float("inf"):
                kind = "max" if order > 0 else "min"
                return _Partial(node, self._reduced(size, kind), kind, 1.0)
            power = size if order == 1.0 else call(_aten.pow.Tensor_Scalar, size, order)
            return _Partial(node, self._reduced(power, "sum"), "sum", order)

    def _reduced(self, line: Node, kind: str) -> Node:
        """A number of this rank's elements, as one element; of none of them that which changes nothing."""
        call, value = self.draft.call, line.meta["val"]
        if kind == "sum":
            number = call(_aten.sum.default, line)
        else:
            least = float("-inf") if kind == "max" else float("inf")
            beside = filled(self.draft, least, value, [1])
            line = call(_aten.cat.default, [line, beside])
            number = call(_aten.amax.default if kind == "max" else _aten.amin.default, line, [0])
        return call(_aten.reshape.default, number, [1])

    def _combine(self, partials: list[_Partial]) -> None:
        """One gather of all these numbers; each becomes the same on every rank."""
        draft, world = self.draft, self.plan.world
        call, count = draft.call, len(partials)
        dtypes = {p.value.meta["val"].dtype for p in partials}
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
        with draft.after(*(p.value for p in partials)):
            mine = [cast(draft, p.value, dtype) for p in partials]
            line = call(_aten.cat.default, mine)
            form = draft.form(line.meta["val"], shape=[count * world])
            started = draft.call_known(form, ALL_GATHER, line, world, self.group)
            arrived = draft.call_known(draft.form(form), ops.WAIT, started)
            table = call(_aten.reshape.default, arrived, [world, count])
            totals: dict[str, Node] = {}
            for kind in dict.fromkeys(p.kind for p in partials):
                if kind == "sum":
                    totals[kind] = call(_aten.sum.dim_IntList, table, [0])
                else:
                    op = _aten.amax.default if kind == "max" else _aten.amin.default
                    totals[kind] = call(op, table, [0])
            results = []
            for i, partial in enumerate(partials):
                number = call(_aten.select.int, totals[partial.kind], 0, i)
                if partial.order == 2.0:
                    number = call(_aten.sqrt.default, number)
                elif partial.order != 1.0:
                    number = call(_aten.pow.Tensor_Scalar, number, 1.0 / partial.order)
                results.append(cast(draft, number, partial.node.meta["val"].dtype))
        for partial, number in zip(partials, results, strict=True):
            partial.node.replace_all_uses_with(number)

    def _give_whole(self, nodes: Sequence[Node], reader: Node) -> None:
        """To a reader that needs all of a gradient."""
        for node in dict.fromkeys(n for n in nodes if n in self.pieces or n in self._lists):
            if node in self._lists:
                raise AssertionError(f"{reader.name} reads a list of gradients as one value")
            if node not in self._whole:
                own, piece = self.pieces[node]
                value = node.meta["val"]
                with self.draft.after(own):
                    (self._whole[node],) = gather(
                        self.draft, self.plan, [piece], [own], [value], self.group
                    )
            reader.replace_input_with(node, self._whole[node])


def read_pieces(draft: Draft, plan: Plan, pieces: dict[Node, tuple[Node, Portion]]) -> None:
    """Lets all that reads these gradients read this rank's pieces. pieces: by what stood for the whole gradient."""
    if pieces:
        assert plan.group is not None
        _Readers(draft, plan, plan.group, pieces).rewrite()


def _wide(*dtypes: torch.dtype) -> torch.dtype:
    """What numbers of these are added up in."""
    return torch.float64 if torch.float64 in dtypes else torch.float32
