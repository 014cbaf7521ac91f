"""The graph builder of passes: a copy of the step's graph that becomes a program; each new node gets a fake value."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from gradsync_fx._torch import (
    FakeTensor,
    compute_unbacked_bindings,
    stable_topological_sort,
)
from gradsync_fx.ir import ops
from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.graph_copy import copy_nodes, module_of, new_call
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Kind, Program, Slot, Step, output_values


def _start_of_ops() -> None:
    """Marks where inputs end; gone from the finished program."""


@dataclass(slots=True)
class Draft:
    """A program while passes work on it.

    of: nodes of the step to their copies here. slots: grows with each new input. notes: the copies of what the step's
    notes point out. host_values: outputs for the host's calls. counted: in a program that masks an empty window, its
    weight, which is the last output, and whether that is more than 0. kept: nodes that stay though nothing reads them.
    """

    name: str
    module: GraphModule
    slots: list[Slot]
    of: dict[Node, Node]
    fake_mode: Any
    notes: dict[tuple[ops.Role, int], list[Node]] = field(default_factory=dict)
    host_values: int = 0
    counted: tuple[Node, Node] | None = None
    kept: list[Node] = field(default_factory=list)
    _inputs: dict[tuple[Kind, Any], Node] = field(default_factory=dict)
    _ends: dict[Node, Node] = field(default_factory=dict)
    _start: Node | None = None

    @classmethod
    def copy_of(cls, name: str, step: Step, fake_mode: Any) -> Draft:
        """A draft that starts as the whole step."""
        graph = Graph()
        of: dict[Node, Node] = {}
        values = copy_nodes(step.module.graph, graph, of)
        (out,) = step.module.graph.find_nodes(op="output")
        graph.output(values).meta.update(out.meta)
        module = module_of(step.module, graph)
        module.meta.update(step.module.meta)
        for node, copy in of.items():
            copy.meta["origin"] = node.name
        draft = cls(name, module, list(step.slots), of, fake_mode)
        draft._take_notes()
        return draft

    def _take_notes(self) -> None:
        """Notes are for passes: what they point out is kept here, and the chain's end is no output."""
        values = [None if _is_note(v) else v for v in self.outputs()]
        self.set_outputs(values)
        for node in self.graph.find_nodes(op="call_function", target=ops.NOTE):
            role = ops.Role(argument(node, 2))
            self.notes.setdefault((role, argument(node, 3)), []).append(argument(node, 1))
        for node in reversed(self.graph.find_nodes(op="call_function", target=ops.NOTE)):
            self.graph.erase_node(node)

    def note(self, role: ops.Role) -> Node | None:
        """The one value that was noted in this role, or None."""
        found = self.notes.get((role, 0))
        return found[0] if found else None

    def modules(self) -> list[GraphModule]:
        """Its one graph, for the runner of passes."""
        return [self.module]

    @property
    def graph(self) -> Graph:
        return self.module.graph

    def placeholders(self) -> list[Node]:
        return self.graph.find_nodes(op="placeholder")

    def input(self, slot: Slot, value: torch.Tensor) -> Node:
        """The placeholder of a slot, made on first use; `value` is a real tensor of its shape, strides and dtype."""
        known = self._inputs.get((slot.kind, slot.key))
        if known is not None:
            return known
        with self.graph.inserting_before(self._first_op()):
            node = self.graph.placeholder(f"{slot.kind.value}_{len(self.slots)}")
        node.meta["val"] = self.form(value)
        self.slots.append(slot)
        self._inputs[slot.kind, slot.key] = node
        return node

    @contextmanager
    def after(self, *nodes: Node) -> Iterator[None]:
        """New nodes go after the last of `nodes` (after all inputs, for an input), and after those put there earlier.

        So nodes keep the order in which they were inserted, as collectives must: in the same order on all ranks.
        """
        last = max(nodes)
        if last.op == "placeholder":
            last = self._first_op()
        following = self._ends.get(last, last).next
        with self.graph.inserting_before(following):
            yield
        self._ends[last] = following.prev

    @contextmanager
    def at_start(self) -> Iterator[None]:
        """New nodes go before those of the step, after the inputs."""
        with self.after(self._first_op()):
            yield

    def sort(self) -> None:
        """Puts each def before its uses again; the sort is stable."""
        stable_topological_sort(self.graph)
        self._ends.clear()

    def _first_op(self) -> Node:
        if self._start is None:
            self._start = next(n for n in self.graph.nodes if n.op != "placeholder")
            # Passes may erase an op, but never this one.
            with self.graph.inserting_before(self._start):
                self._start = self.graph.call_function(_start_of_ops)
        return self._start

    def call(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Node:
        """A node at the insertion point, with the fake value of its result."""
        return emit(self.graph, self.fake_mode, target, args, kwargs)

    def form(
        self,
        like: torch.Tensor,
        *,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """A fake value with a tensor's shape, strides and dtype; contiguous, where another shape is given.

        Made without torch's dispatch for fake tensors, which takes ten times as long: a program has thousands.
        """
        dtype, sizes = dtype or like.dtype, tuple(like.shape if shape is None else shape)
        strides = like.stride() if shape is None else _contiguous(sizes)
        if like.device.type == "meta" or not all(type(n) is int for n in (*sizes, *strides)):
            with self.fake_mode:
                return torch.empty_strided(sizes, strides, dtype=dtype, device=like.device)
        blank = torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
        return FakeTensor(self.fake_mode, blank, like.device)

    def call_known(
        self, form: Any, target: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Node:
        """A node at the insertion point whose fake value is known."""
        node = new_call(self.graph, target, args, kwargs)
        node.meta["val"] = form
        return node

    def write(self, target: Node, value: Node) -> None:
        """A lasting effect: `value` is written into an input, at the end of the program."""
        (out,) = self.graph.find_nodes(op="output")
        with self.graph.inserting_before(out):
            self.call_known(target.meta["val"], torch.ops.aten.copy_.default, target, value)

    def drop_write(self, write: Node) -> None:
        """Takes a lasting effect out; later uses read the tensor as it was."""
        write.replace_all_uses_with(argument(write, 0))
        self.graph.erase_node(write)

    def set_outputs(self, values: list[Any]) -> None:
        (out,) = self.graph.find_nodes(op="output")
        out.args = (tuple(values),)

    def outputs(self) -> list[Any]:
        return output_values(self.module)

    def leave_only(self, values: Collection[Node]) -> None:
        """Takes out all outputs and effects, and every op that these values do not need."""
        needed = upstream(values)
        (end,) = self.graph.find_nodes(op="output")
        self.set_outputs([])
        for node in reversed(list(self.graph.nodes)):
            stays = node in needed or node is end or node is self._start
            if not stays and node.op != "placeholder":
                self.graph.erase_node(node)

    def live(self) -> set[Node]:
        """All but dead code."""
        return _needed(self.graph, set(self.kept))

    def finish(self) -> Program:
        """Drops dead code, collectives and unread inputs included."""
        kept = self.live()
        for node in reversed(list(self.graph.nodes)):
            if node not in kept and node.op != "placeholder":
                self.graph.erase_node(node)
        slots = []
        for node, slot in zip(self.placeholders(), self.slots, strict=True):
            if node.users:
                slots.append(slot)
            else:
                self.graph.erase_node(node)
        self.module.delete_all_unused_submodules()
        self.module.recompile()
        masked = self.counted is not None
        return Program(self.name, self.module, tuple(slots), self.host_values, masked)


def emit(graph: Graph, fake_mode: Any, target: Any, args: Any, kwargs: Any) -> Node:
    """A node at the insertion point, with the fake value of its result."""
    node = graph.call_function(target, args, kwargs)
    plain = torch.fx.map_arg((args, kwargs), lambda n: n.meta["val"])
    with fake_mode:
        node.meta["val"] = target(*plain[0], **plain[1])
    if target is ops.ITEM and fake_mode.shape_env is not None:
        found = compute_unbacked_bindings(fake_mode.shape_env, node.meta["val"])
        if found:
            node.meta["unbacked_bindings"] = found
    return node


def _contiguous(sizes: Sequence[Any]) -> tuple[Any, ...]:
    strides: list[Any] = []
    step: Any = 1
    for size in reversed(sizes):
        strides.insert(0, step)
        step = step * (1 if type(size) is int and size == 0 else size)
    return tuple(strides)


def _is_note(value: Any) -> bool:
    return isinstance(value, Node) and value.target is ops.NOTE


def _needed(graph: Graph, kept: Collection[Node]) -> set[Node]:
    """The live nodes: outputs, writes, asserts, `kept`, and what they depend on.

    torch calls collectives impure, so that they are never dead; here a collective without uses is dead code.
    """
    copy = torch.ops.aten.copy_.default
    read = upstream(n for n in graph.nodes if n.op == "output" or n in kept or n.target is copy)
    effects = (
        n
        for n in graph.nodes
        if n not in read  # torch takes its time to say whether a node is impure
        and n.op == "call_function"
        and not _is_communication(n)
        and n.is_impure(impure_random=False)
    )
    return read | upstream(effects, without=read)


def _is_communication(node: Node) -> bool:
    return ops.is_collective(node) or node.target is ops.WAIT
