"""A program that ends a window, cut in two: what starts the reductions, and what needs them.

forward, backward; sums += g; start(sums)   |   wait(sums); norm, clipping; update; sums = 0
first half: ends without a wait                 second half: the update

The second half is all that depends on a reduced sum, and every write that is of the update: of parameters, optimizer
state, zeroed sums. What comes after one of these by the memory that both touch goes with it, so neither half reads or
writes anything in another order than the whole. Numbers and views are made anew in the second half, other values are
handed over; so is what a collective still sends from, which nobody may overwrite before its wait.

The update of a tail is the update of a boundary: where both have the same second half, it is compiled once.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.comm.inplace_pieces import START_PIECES
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.graph_copy import module_of
from gradsync_fx.ir.memory import (
    MAY_ALIAS,
    aliased,
    base_of,
    form_apart,
    order_by_memory,
    viewed,
)
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Slot, output_values
from gradsync_fx.passes.device_numbers import accelerator_of
from gradsync_fx.passes.fuse import resets
from gradsync_fx.passes.rewritten import Halves, Rewritten
from gradsync_fx.planning.plan import Plan


_COPY = torch.ops.aten.copy_.default
_WAITS = (WAIT_SUMS, ops.WAIT)
_HELD = (Kind.PARAMETER, Kind.STATE, Kind.SCALAR, Kind.WEIGHT)
OF_UPDATE = "of_update"  # of a node's meta: a write that only an update makes


def mark_update_writes(draft: Draft, plan: Plan) -> None:
    """Notes on the writes of the step that they are of what closes here, for the cut."""
    for write, sources in plan.regions.boundary_writes.items():
        if not plan.is_open(sources):
            draft.of[write].meta[OF_UPDATE] = True


def cut_in_halves(rewritten: Rewritten) -> None:
    """Cuts a program that reduces and updates, or whose update waits for a vote.

    On a device both halves are queued at once, and one program is one launch less: it stays whole, unless something
    comes between its parts.
    """
    program, main = rewritten.program, rewritten.main
    starts = (START_SUMS, START_PIECES)
    reduces = any(n.target in starts or n.meta.get("bucket") for n in main.graph.nodes)
    on_device = accelerator_of(program.inputs()) is not None
    between = program.voted or program.closes and bool(program.arriving)
    if between or program.closes and reduces and not on_device:
        rewritten.halves = Cutter(main, rewritten.slots).halves()


class Cutter:
    """Cuts a graph in two; second: the nodes of the second half.

    slots: of the placeholders; there may be one more, a vector of numbers. seeds: with all that depends on them and has
    to come after them they are the second half; by default what an update consists of.
    """

    def __init__(
        self, module: GraphModule, slots: Sequence[Slot], seeds: Iterable[Node] | None = None
    ) -> None:
        self._module, self._slots = module, slots
        self._holders = list(module.graph.find_nodes(op="placeholder"))
        self._position = {holder: i for i, holder in enumerate(self._holders)}
        self._kind = dict(zip(self._holders, (slot.kind for slot in slots), strict=False))
        self._nodes = [n for n in module.graph.nodes if n.op not in ("placeholder", "output")]
        self._resets = frozenset(resets(module).values())
        if seeds is None:
            self.second = self._closure(n for n in self._nodes if self._is_late(n))
            self._sink()
        else:
            self.second = self._closure(seeds)
        self._given: dict[Node, int] = {}  # outputs of the first half, each with its number

    def _is_late(self, node: Node) -> bool:
        """A wait for what an update needs, or a write of the update."""
        if node.target in _WAITS:
            return self._is_of_update(node)
        if node.target is not _COPY:
            return False
        kind = self._kind.get(argument(node, 0))
        return bool(node.meta.get(OF_UPDATE)) or kind is Kind.STATE or node in self._resets

    def _is_of_update(self, wait: Node) -> bool:
        if wait.target is WAIT_SUMS:
            return not wait.meta.get("early")
        started = argument(wait, 0)
        return bool(started.meta.get("bucket")) and not started.meta.get("early")

    def _closure(self, seeds: Iterable[Node]) -> set[Node]:
        """Seeds, what depends on them, and what has to come after them."""
        later: dict[Node, list[Node]] = {}
        for node, before in order_by_memory(self._nodes, free=(_COPY, *_WAITS)).items():
            for one in before:
                later.setdefault(one, []).append(node)
        found, stack = set[Node](), list(seeds)
        while stack:
            node = stack.pop()
            if node.op != "output" and node not in found:
                found.add(node)
                stack += [*node.users, *later.get(node, ())]
        return found

    def _sink(self) -> None:
        """What is made of held tensors and numbers alone, for the update alone, is part of the update."""
        changed = {base_of(argument(n, 0)) for n in self._nodes if n.target is _COPY}
        changed -= {base_of(argument(n, 0)) for n in self.second if n.target is _COPY}
        held = {h for h, kind in self._kind.items() if kind in _HELD and h not in changed}
        for node in self._nodes:
            if not node.is_impure() and all(n in held for n in node.all_input_nodes):
                held.add(node)
        for node in reversed(self._nodes):
            if node in held and node.users and all(u in self.second for u in node.users):
                self.second.add(node)

    def halves(self) -> Halves:
        second, inputs = self._make_second()
        results = tuple(self._result(v) for v in output_values(self._module))
        under_way = self._kept_for_collectives()
        first, taken = self._make_first()
        forms = tuple(
            v.meta["val"] if isinstance(v, Node) else v for v in output_values(self._module)
        )
        return Halves(
            first=first,
            second=second,
            first_inputs=taken,
            second_inputs=tuple(inputs),
            results=results,
            inputs=tuple(h.meta["val"] for h in self._holders),
            forms=forms,
            started=tuple(self._given[n] for n in under_way),
        )

    def _give(self, node: Node) -> int:
        """The number of a value among the first half's outputs."""
        return self._given.setdefault(node, len(self._given))

    def _result(self, value: Any) -> tuple[str, Any]:
        if not isinstance(value, Node):
            return "constant", value
        if value.target is _COPY:
            value = argument(value, 0)
        if value in self._position:
            return "input", self._position[value]
        if value in self.second:
            return "second", self._returned[value]
        return "first", self._give(value)

    def _kept_for_collectives(self) -> list[Node]:
        """Results of collectives that the first half starts and does not wait for; what they send is given, too."""
        found = []
        for node in self._nodes:
            if node in self.second or not ops.is_collective(node):
                continue
            if any(u in self.second and u.target is ops.WAIT for u in node.users):
                found.append(node)
                for sent in node.all_input_nodes:
                    source = _source(sent)
                    if source.op == "call_function":
                        self._give(source)
        return found

    def _make_second(self) -> tuple[GraphModule | None, list[tuple[str, int]]]:
        values = output_values(self._module)
        returned = dict.fromkeys(
            v for v in values if isinstance(v, Node) and v in self.second and v.target is not _COPY
        )
        self._returned = {value: i for i, value in enumerate(returned)}
        body = [n for n in self._nodes if n in self.second]
        if not body:
            return None, []
        made = _SecondHalf(self._module, self._position, self.second)
        for node in body:
            for source in node.all_input_nodes:
                made.ask(source)
        order = sorted(
            made.inputs,
            key=lambda n: (
                (str(self._slots[i].kind), str(self._slots[i].key))
                if (i := self._position[n]) < len(self._slots)
                else ("", "")
            ),
        )
        graph, env = Graph(), dict[Node, Node]()

        def take(node: Node) -> None:
            env[node] = graph.placeholder(f"input_{len(env)}")

        def add(node: Node) -> None:
            args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
            name = f"n_{len(env)}"
            env[node] = graph.create_node(node.op, node.target, args, kwargs, name=name)
            env[node].meta.update(node.meta)

        for holder in order:
            take(holder)
            env[holder].meta.update(holder.meta)
        for value in made.carried:
            take(value)
            env[value].meta["val"] = form_apart(value.meta["val"])
        for node in self._nodes:
            if node in made.again:
                add(node)
        for node in body:
            add(node)
        graph.output(tuple(env[n] for n in self._returned))
        inputs = [("input", self._position[n]) for n in order]
        inputs += [("first", self._give(n)) for n in made.carried]
        return _module_of(self._module, graph), inputs

    def _make_first(self) -> tuple[GraphModule, tuple[int, ...]]:
        graph, env = Graph(), dict[Node, Node]()
        kept = _needed(self._nodes, self.second, self._given)
        read = {n for node in kept for n in node.all_input_nodes} | {*self._given}
        taken = [
            h for h in self._holders if h in read or not isinstance(h.meta["val"], torch.Tensor)
        ]
        for node in (*taken, *(n for n in self._nodes if n in kept)):
            env[node] = graph.node_copy(node, env.__getitem__)
        graph.output(tuple(env[n] for n in self._given))
        return _module_of(self._module, graph), tuple(self._position[h] for h in taken)


class _SecondHalf:
    """What the second half needs of the first.

    inputs: of the whole. carried: values that are handed over. again: numbers and views, made once more.
    """

    def __init__(
        self, module: GraphModule, position: dict[Node, int], second: Collection[Node]
    ) -> None:
        self._position, self._second = position, second
        # Sizes of the other inputs may be expressions of these.
        self.inputs = dict.fromkeys(
            h for h in position if not isinstance(h.meta["val"], torch.Tensor)
        )
        self.carried: dict[Node, None] = {}
        self.again: dict[Node, None] = {}

    def ask(self, node: Node) -> None:
        if any(node in known for known in (self._second, self.inputs, self.carried, self.again)):
            return
        if node in self._position:
            self.inputs[node] = None
        elif _is_number(node) or node.op == "get_attr" or _source(node) is not node:
            for source in node.all_input_nodes:
                self.ask(source)
            self.again[node] = None
        else:
            self.carried[node] = None


def _is_number(node: Node) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(
        value, int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool
    )


def _source(node: Node) -> Node:
    """The value that a view is of; itself for what has memory of its own. An item of an op's results is its own."""
    while node.op == "call_function":
        index = aliased(node.target)
        if node.target is operator.getitem and viewed(argument(node, 0).target) is None:
            return node
        if node.target in MAY_ALIAS:
            same = argument(node, 0).meta["val"].dtype is node.meta["val"].dtype
            index = 0 if same else None
        if index is None:
            return node
        node = argument(node, index)
    return node


def _needed(nodes: Sequence[Node], without: Collection[Node], given: Collection[Node]) -> set[Node]:
    """What the first half has to compute: what it gives, its effects, and all that these need."""
    found = set[Node]()
    for node in reversed(nodes):
        if node in without:
            continue
        effect = node.target is _COPY or node.op == "call_function" and node.is_impure()
        if effect or node in given or any(u in found for u in node.users):
            found.add(node)
    return found


def _module_of(root: GraphModule, graph: Graph) -> GraphModule:
    graph.lint()
    module = module_of(root, graph)
    module.meta.update(root.meta)
    return module
