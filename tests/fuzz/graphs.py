"""Random steps as plain data, and the ATen graphs that they stand for: every node's role is known, as it was put there.

inputs -> ( forward -> gradients, marked -> hand-written reductions, clipping -> update -> what reads it ) x rounds
       -> writes, outputs, notes

All values broadcast with each other: shapes are (), (3,) and (3, 3). Integers choose among the values that are there,
so that every sketch is a step.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.optim import Optimizer

from gradsync_fx._torch import FakeTensorMode, ShapeEnv
from gradsync_fx.capture.canonicalize import canonicalize
from gradsync_fx.capture.trace_state import HostCall
from gradsync_fx.capture.tracer import Capture
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.program import Kind, Leaf, Slot, Step
from tests.optimizers import OPTIMIZERS


SHAPES = ((), (3,), (3, 3))
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
Op = tuple[str, int, int]
_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
HAND = "hand"  # the group of the reductions that the step itself makes
UNARY = {"tanh": _aten.tanh.default, "negate": _aten.neg.default, "total": _aten.sum.default}
OPS = (*UNARY, "half", "add", "mix", "product", "positive", "chosen", "largest", "turned")
COLLECTIVES = ("reduced", "gathered")


@dataclass(frozen=True)
class Round:
    """Gradients of some parameters, and what is done with them.

    sources: where each gradient comes from. again: gradients of the round before, once more. peeks: they may depend on
    the gradients of the round before. twice: in two backwards. sync: "none", "hand" or "flat". update: an optimizer's
    name, "by hand", or "none". decayed: the update is given other values than the parameters'.
    """

    forward: tuple[Op, ...] = ()
    sources: tuple[int, ...] = (0,)
    again: bool = False
    peeks: bool = False
    twice: bool = False
    sync: str = "none"
    between: tuple[Op, ...] = ()
    clip: str = "none"
    update: str = "SGD"
    decayed: bool = False
    projected: bool = False
    behind: tuple[Op, ...] = ()


@dataclass(frozen=True)
class Sketch:
    """A step and how its windows run.

    parameters: shape and dtype of each, by number. writes: target and value. script: "call" or "tail", with a bit for
    each part that it closes; the data of a call whose bit is set in `bad` is not finite.
    """

    rounds: tuple[Round, ...] = (Round(),)
    parameters: tuple[tuple[int, int], ...] = ((1, 0),)
    buffers: tuple[int, ...] = ()
    data: tuple[int, ...] = (1,)
    writes: tuple[tuple[int, int], ...] = ()
    outputs: tuple[int, ...] = (0,)
    metric: int | None = None
    weight: int | None = None
    reduction: str = "mean"
    finite: bool = False
    every: bool = False
    apart: bool = False
    world: int = 1
    cap: float = 25.0
    script: tuple[tuple[str, int], ...] = (("call", 1),)
    bad: int = 0


@dataclass
class Made:
    """A sketch as a capture, with the roles of its nodes.

    markers: leaf and whether its gradient is the window's (a partial sum's is not). updates: the optimizer of each.
    synced: how each leaf is reduced. noted: values of notes. rules: the optimizers' names.
    """

    sketch: Sketch
    capture: Capture
    markers: dict[Node, tuple[int, bool]]
    updates: dict[Node, int]
    synced: dict[int, str]
    noted: dict[ops.Role, list[Node]]
    rules: list[str]


class Metric:
    """A scheduler's stand-in: keeps what it is stepped with."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def step(self, value: float) -> None:
        self.seen.append(value)


class Maker:
    """Builds the graph of one sketch. pool: values without a gradient of this call in them; tense: those with one."""

    def __init__(self, sketch: Sketch) -> None:
        self.sketch, self.graph = sketch, Graph()
        self.mode = FakeTensorMode(shape_env=ShapeEnv(), static_shapes=True)
        self.holders: list[Node] = []
        self.slots: list[Slot] = []
        self.markers: dict[Node, tuple[int, bool]] = {}
        self.updates: dict[Node, int] = {}
        self.synced: dict[int, str] = {}
        self.noted: dict[ops.Role, list[Node]] = {}
        self.chain: Node | None = None
        source = torch.Generator().manual_seed(0)

        def start(shape: int) -> Tensor:
            return torch.randn(SHAPES[shape], generator=source, dtype=torch.float64)

        self.tensors = [nn.Parameter(start(s).to(DTYPES[d])) for s, d in sketch.parameters]
        self.buffers = [start(s) for s in sketch.buffers]
        self.optimizers: list[Optimizer] = []
        self.rules: list[str] = []
        self.pool = [
            *(self._input(Kind.PARAMETER, t) for t in self.tensors),
            *(self._input(Kind.BUFFER, t) for t in self.buffers),
            *(self._input(Kind.DATA, start(s)) for s in sketch.data),
        ]
        self.tense: list[Node] = []
        self.new: dict[int, Node] = {}  # parameters, as the updates so far leave them

    def _input(self, kind: Kind, like: Tensor) -> Node:
        node = self.graph.placeholder(f"in_{len(self.slots)}")
        node.meta["val"] = self.mode.from_tensor(like.detach())
        self.holders.append(node)
        self.slots.append(Slot(kind, f"{kind.value} {len(self.slots)}", len(self.slots)))
        return node

    def emit(self, target: Any, *args: Any, **kwargs: Any) -> Node:
        return emit(self.graph, self.mode, target, args, kwargs)

    def real(self, node: Node) -> Node:
        if node.meta["val"].dtype.is_floating_point:
            return node
        return self.emit(torch.ops.prims.convert_element_type.default, node, torch.float64)

    def fit(self, node: Node, like: Tensor) -> Node:
        """A value in the form of another."""
        node, wanted = self.real(node), like.dim()
        if wanted < node.meta["val"].dim():
            node = (
                self.emit(_aten.sum.default, node)
                if not wanted
                else self.emit(_aten.sum.dim_IntList, node, [0])
            )
        elif wanted > node.meta["val"].dim():
            node = self.emit(_aten.expand.default, node, list(like.shape))
        if node.meta["val"].dtype is not like.dtype:
            node = self.emit(torch.ops.prims.convert_element_type.default, node, like.dtype)
        return node

    def apply(self, asked: tuple[Op, ...], values: list[Node], into: list[Node]) -> None:
        for name, a, b in asked:
            left, right = values[a % len(values)], values[b % len(values)]
            into.append(self._op(name, self.real(left), self.real(right)))
            if values is not into:
                values.append(into[-1])

    def _op(self, name: str, a: Node, b: Node) -> Node:
        matrix, row = torch.empty(3, 3).double(), torch.empty(3).double()
        if name in UNARY:
            return self.emit(UNARY[name], a)
        if name == "half":
            return self.emit(_aten.mul.Tensor, a, 0.5)
        if name == "add":
            return self.emit(_aten.add.Tensor, a, b)
        if name == "mix":
            return self.emit(_aten.tanh.default, self.emit(_aten.mul.Tensor, a, b))
        if name == "product":
            return self.emit(_aten.mm.default, self.fit(a, matrix), self.fit(b, matrix))
        if name == "turned":
            return self.emit(_aten.t.default, self.fit(a, matrix))
        if name == "positive":
            return self.emit(_aten.gt.Scalar, a, 0)
        if name == "chosen":
            condition = self.emit(_aten.gt.Scalar, a, 0)
            return self.emit(_aten.where.self, condition, b, self.emit(_aten.neg.default, b))
        if name == "largest":
            both = self.emit(_aten.max.dim, self.fit(a, matrix), 0)
            return self.emit(operator.getitem, both, 1 if b is a else 0)
        if name == "reduced":
            return self.reduced(a)
        assert name == "gathered"
        world = self.sketch.world
        every = self.emit(_c10d.all_gather_into_tensor.default, self.fit(a, row), world, HAND)
        return self.emit(_aten.slice.Tensor, self.emit(ops.WAIT, every), 0, 0, 3)

    def reduced(self, node: Node) -> Node:
        return self.emit(ops.WAIT, self.emit(ops.ALL_REDUCE, node, "sum", HAND))

    def note(self, value: Node, role: ops.Role, index: int = 0) -> None:
        if self.chain is None:
            self.chain = self.emit(_aten.full.default, [0], 0.0)
        value = self.emit(_aten.detach.default, value)
        self.chain = self.emit(ops.NOTE, self.chain, value, int(role), index)
        self.noted.setdefault(role, []).append(value)

    def round(self, asked: Round, leaves: list[int]) -> None:
        self.apply(asked.forward, self.pool, self.pool)
        sources = self.pool + (self.tense if asked.peeks else [])
        gradients = {}
        for leaf, source in zip(leaves, asked.sources * len(leaves), strict=False):
            like = self.tensors[leaf]
            total = self.fit(sources[(source + leaf) % len(sources)], like)
            if asked.twice:
                total = self._marker(total, leaf, partial=True)
                second = self.fit(sources[(source + 1) % len(sources)], like)
                total = self.emit(_aten.add.Tensor, total, second)
            gradients[leaf] = self._marker(total, leaf)
        if self.sketch.finite:
            self.note(self.fit(sources[-1], torch.empty(()).double()), ops.Role.LOSS)
        self.synced.update(dict.fromkeys(gradients, asked.sync))
        gradients = self._by_hand(asked.sync, gradients)
        self.tense.extend(gradients.values())
        self.apply(asked.between, [*self.pool, *self.tense], self.tense)
        self._clip(asked.clip, gradients)
        self._update(asked, gradients)
        self.apply(asked.behind, [*self.pool, *self.tense], self.tense)

    def _marker(self, value: Node, leaf: int, *, partial: bool = False) -> Node:
        node = self.emit(ops.LEAF_GRAD, value, leaf)
        self.markers[node] = (leaf, not partial)
        return node

    def _by_hand(self, sync: str, gradients: dict[int, Node]) -> dict[int, Node]:
        if sync == "none":
            return gradients
        world = self.sketch.world
        if sync == "hand":
            return {
                leaf: self.emit(_aten.div.Tensor, self.reduced(g), world)
                for leaf, g in gradients.items()
            }
        flat = [self.emit(_aten.reshape.default, g, [-1]) for g in gradients.values()]
        total = self.emit(_aten.div.Tensor, self.reduced(self.emit(_aten.cat.default, flat)), world)
        start, found = 0, {}
        for leaf, g in gradients.items():
            end = start + g.meta["val"].numel()
            piece = self.emit(_aten.slice.Tensor, total, 0, start, end)
            piece = self.emit(_aten.reshape.default, piece, list(g.meta["val"].shape))
            found[leaf], start = self.fit(piece, self.tensors[leaf]), end
        return found

    def _clip(self, clip: str, gradients: dict[int, Node]) -> None:
        if clip == "none":
            return
        if clip == "mixed":  # with whatever there is
            for leaf, g in gradients.items():
                other = self.tense[leaf % len(self.tense)]
                gradients[leaf] = self.fit(self._op("add", g, self.real(other)), self.tensors[leaf])
            return
        squares = [self.emit(_aten.mul.Tensor, g, g) for g in gradients.values()]
        total = self.emit(_aten.sum.default, squares[0])
        for square in squares[1:]:
            total = self.emit(_aten.add.Tensor, total, self.emit(_aten.sum.default, square))
        self.tense.append(self.emit(_aten.sqrt.default, total))
        scale = self.emit(_aten.reciprocal.default, self.emit(_aten.add.Tensor, total, 1.0))
        for leaf, g in gradients.items():
            scaled = self.emit(_aten.mul.Tensor, g, scale)
            gradients[leaf] = self.fit(scaled, self.tensors[leaf])

    def _update(self, asked: Round, gradients: dict[int, Node]) -> None:
        if asked.update == "none":
            return
        given = {leaf: self.holders[leaf] for leaf in gradients}
        if asked.decayed:
            given = {leaf: self.emit(_aten.mul.Tensor, p, 0.9) for leaf, p in given.items()}
        if asked.update == "by hand":
            for leaf, g in gradients.items():
                step = self.emit(_aten.mul.Tensor, g, 0.1)
                self.new[leaf] = self.emit(_aten.sub.Tensor, given[leaf], step)
                self.tense.append(self.new[leaf])
            return
        optimizer = OPTIMIZERS[asked.update]([self.tensors[leaf] for leaf in gradients])
        self.optimizers.append(optimizer)
        self.rules.append(asked.update)
        which = list(range(len(gradients)))
        params, grads = list(given.values()), list(gradients.values())
        update = self.emit(ops.UPDATE, len(self.optimizers) - 1, which, params, grads, "")
        self.updates[update] = len(self.optimizers) - 1
        for i, leaf in enumerate(gradients):
            self.new[leaf] = self.emit(operator.getitem, update, i)
            if asked.projected:
                self.new[leaf] = self.emit(_aten.mul.Tensor, self.new[leaf], 0.99)
            self.pool.append(self.new[leaf])

    def made(self) -> Made:
        """All of it."""
        sketch = self.sketch
        if sketch.weight is not None:
            source = self.fit(self.pool[sketch.weight % len(self.pool)], torch.empty(()).double())
            bounded = self.emit(_aten.tanh.default, source)
            self.note(self.emit(_aten.add.Tensor, bounded, 2.0), ops.Role.WEIGHT)
        left, mine = list(range(len(self.tensors))), list[int]()
        for asked in sketch.rounds:
            if not (asked.again and mine) or any(leaf in self.new for leaf in mine):
                mine, left = left[: len(asked.sources)], left[len(asked.sources) :]
            if mine:
                self.round(asked, mine)
        values = [*self.pool, *self.tense]
        host = ()
        if sketch.metric is not None:
            value = values[sketch.metric % len(values)]
            self.note(self.fit(value, torch.empty(()).double()), ops.Role.HOST)
            host = (HostCall(Metric(), None, (("number", 0),)),)
        written = [self.emit(_aten.copy_.default, self.holders[i], n) for i, n in self._writes()]
        results = [values[i % len(values)] for i in sketch.outputs]
        results += written[: sum(sketch.outputs) % 3]
        outputs = [*(r if i % 5 else None for i, r in enumerate(results, 1)), self.chain]
        self.graph.output(tuple(outputs))
        module = GraphModule(nn.Module(), self.graph)
        canonicalize(module)
        leaves = {i: Leaf(i, self.slots[i].name, t) for i, t in enumerate(self.tensors)}
        names = [slot.name for slot in self.slots]
        capture = Capture(
            step=Step(module, tuple(self.slots), leaves),
            fake_mode=self.mode,
            optimizers=tuple(self.optimizers),
            holders=(),
            ddp=(),
            parameters=dict(zip(names, self.tensors, strict=False)),
            buffers=dict(zip(names[len(self.tensors) :], self.buffers, strict=False)),
            hooked=(),
            host_calls=host,
            weighed=sketch.weight is not None,
            no_syncs=(),
            batch_norms=(),
            moved=(),
            declared=(),
            numbers=(),
            never_zeroed=False,
        )
        return Made(
            sketch, capture, self.markers, self.updates, self.synced, self.noted, self.rules
        )  # fmt: skip

    def _writes(self) -> list[tuple[int, Node]]:
        """The epilogue: what each input is left with, as functionalisation leaves it."""
        values = [*self.pool, *self.tense]
        found = dict(self.new)
        first, count = len(self.tensors), len(self.holders)
        for target, value in self.sketch.writes:
            if first < count:
                found[first + target % (count - first)] = values[value % len(values)]
        fitted = []
        for i in sorted(found):
            value = self.fit(found[i], self.holders[i].meta["val"])
            fitted.append((i, self.emit(_aten.copy.default, self.holders[i], value)))
        return fitted
