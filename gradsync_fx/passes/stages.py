"""A program cut at its opaque updates: stages that run one after the other, with the optimizers' own steps between.

      stage 0: gradients of u1    u1   stage 1: what reads a parameter after u1    u2   stage 2 ...

An op is in the earliest stage that has all it depends on. A write to a parameter, a buffer or a tensor of the user's is
in the stage that makes its value, so that the optimizer's code sees it. A read of such a tensor as it was before a
write or an update gets a copy, made before. Random numbers are drawn in the order of the step.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Graph, Node

from gradsync_fx.ir.graph_copy import module_of
from gradsync_fx.ir.memory import MAY_ALIAS, base_of, form_apart
from gradsync_fx.ir.ops import UPDATE, argument
from gradsync_fx.ir.program import Kind, Program, Slot, output_values, writes
from gradsync_fx.optim.opaque import Opaque
from gradsync_fx.passes.halves import OF_UPDATE


_aten = torch.ops.aten
SEEN_BY_ALL = frozenset((Kind.PARAMETER, Kind.BUFFER, Kind.DATA))


@dataclass(slots=True)
class Stage:
    """A piece of a program, and the optimizer's step that runs after it.

    program: None where nothing is computed.
    inputs: of the program: positions of the whole program's inputs, or names of what an earlier stage gave.
    outputs: names of what this one gives, in the order of the program's outputs.
    update: None after the last stage.
    gradients: names of what the update is given.
    """

    program: Program | None
    inputs: list[int | str]
    outputs: list[str]
    update: Opaque | None
    gradients: list[str]


@dataclass(slots=True)
class Stages:
    """The stages of one program.

    results: of the whole program, by name, by input (as it is at the end) or constant.
    forms: fake values of those by name.
    """

    stages: list[Stage]
    results: list[tuple[str, Any]]
    forms: dict[str, Any]


@dataclass(slots=True)
class _Part:
    """A stage in the making. env: nodes of the whole program to nodes here. writes: holder, value, of the update."""

    number: int
    graph: Graph = field(default_factory=Graph)
    env: dict[Node, Any] = field(default_factory=dict)
    inputs: list[int | str] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    gives: dict[str, Node] = field(default_factory=dict)
    writes: list[tuple[Node, Node, bool]] = field(default_factory=list)


def is_cut(program: Program) -> bool:
    """Whether it has an opaque update."""
    return bool(program.module.graph.find_nodes(op="call_function", target=UPDATE))


def cut_at_updates(program: Program) -> Stages:
    """The stages of a program with opaque updates; the program itself stays as it is."""
    return _StageCutter(program).stages()


class _StageCutter:
    def __init__(self, program: Program) -> None:
        self._program = program
        graph = program.module.graph
        self._holders = dict(zip(graph.find_nodes(op="placeholder"), program.slots, strict=True))
        self._position = {holder: i for i, holder in enumerate(self._holders)}
        self._updates = graph.find_nodes(op="call_function", target=UPDATE)
        self._lasting = set(writes(program.module))
        self._of_parameter = {
            slot.name: holder
            for holder, slot in self._holders.items()
            if slot.kind is Kind.PARAMETER
        }
        # A parameter as an update leaves it: the node that stands for it, and its holder.
        self._updated: dict[Node, Node] = {}
        for update in self._updates:
            names = update.meta["parameters"]
            for item in update.users:
                self._updated[item] = self._of_parameter[names[argument(item, 1)]]
        self._stage: dict[Node, int] = {}
        self._changes: dict[Node, set[int]] = {}
        self._place()
        self._parts = [_Part(i) for i in range(len(self._updates) + 1)]

    def _place(self) -> None:
        """The stage of every node, and the stages after which a tensor is another one."""
        done = 0
        for node in self._program.module.graph.nodes:
            at = max((self._stage[n] for n in node.all_input_nodes), default=0)
            if node in self._updates:
                self._stage[node] = done + 1
                for name in node.meta["parameters"]:
                    self._changes.setdefault(self._of_parameter[name], set()).add(done)
                done += 1
                continue
            if node in self._lasting:
                holder = argument(node, 0)
                if self._holders[holder].kind not in SEEN_BY_ALL:
                    at = max((at, *(self._stage.get(u, 0) for u in holder.users)))
                self._changes.setdefault(holder, set()).add(at)
            elif _draws(node):
                at = max(at, done)
            self._stage[node] = at

    def stages(self) -> Stages:
        """Fills the parts in the order of the program; a later part asks earlier ones for what it needs."""
        found: list[tuple[Opaque | None, list[str]]] = []
        for node in self._program.module.graph.nodes:
            if node.op in ("placeholder", "output", "get_attr") or node in self._updated:
                continue
            if node in self._updates:
                found.append((node.meta["opaque"], self._before_update(node)))
            elif not self._already_there(node):
                self._copy(self._parts[self._stage[node]], node)
        found.append((None, []))
        outputs = output_values(self._program.module)
        results = [self._result(value) for value in outputs]
        forms = {v.name: v.meta["val"] for v in outputs if isinstance(v, Node)}
        return Stages(
            [self._finish(part, *rest) for part, rest in zip(self._parts, found, strict=True)],
            results,
            forms,
        )

    def _already_there(self, node: Node) -> bool:
        """A write of what the update itself has left in the parameter."""
        return node in self._lasting and self._updated.get(argument(node, 1)) is node.args[0]

    def _before_update(self, update: Node) -> list[str]:
        """Gradients, given by the stage; and what the step itself wrote into parameters before the update."""
        part = self._parts[self._stage[update] - 1]
        for name, value in zip(update.meta["parameters"], argument(update, 2), strict=True):
            holder = self._of_parameter[name]
            if value is holder or self._updated.get(value) is holder:
                continue
            part.writes.append((self._read(part, holder), self._value(part, value), False))
        return [self._give(part, gradient) for gradient in argument(update, 3)]

    def _copy(self, part: _Part, node: Node) -> None:
        if node in self._lasting:
            holder, value = argument(node, 0), argument(node, 1)
            of_update = bool(node.meta.get(OF_UPDATE))
            part.writes.append((self._read(part, holder), self._value(part, value), of_update))
            return
        for source in node.all_input_nodes:
            self._value(part, source)
        part.env[node] = part.graph.node_copy(node, lambda n: part.env[n])

    def _value(self, part: _Part, node: Node) -> Node:
        """A value of the whole program, inside of a part."""
        if node in part.env:
            return part.env[node]
        holder = self._updated.get(node, node)
        if node.op == "get_attr":
            made = part.graph.node_copy(node)
            made.meta.update(node.meta)
        elif holder in self._holders:
            since = self._stage[node] if node in self._updated else 0
            if any(since <= at < part.number for at in self._changes.get(holder, ())):
                made = self._carried(part, self._parts[since], node)
            else:
                made = self._read(part, holder)
        elif not isinstance(node.meta.get("val"), torch.Tensor) and node.op != "call_module":
            # Numbers are made anew from the tensors, or numbers, that they come from.
            for source in node.all_input_nodes:
                self._value(part, source)
            made = part.graph.node_copy(node, lambda n: part.env[n])
        else:
            made = self._carried(part, self._parts[self._stage[node]], node)
        part.env[node] = made
        return made

    def _read(self, part: _Part, holder: Node) -> Node:
        """An input of the whole program, as it is when the part runs."""
        position = self._position[holder]
        return self._input(part, position, holder, self._holders[holder])

    def _carried(self, part: _Part, source: _Part, node: Node) -> Node:
        made = self._input(
            part, self._give(source, node), node, Slot(Kind.CARRIED, node.name, node.name)
        )
        made.meta["val"] = form_apart(node.meta["val"])
        return made

    def _input(self, part: _Part, key: int | str, like: Node, slot: Slot) -> Node:
        if key in part.inputs:
            return part.graph.find_nodes(op="placeholder")[part.inputs.index(key)]
        first = next((n for n in part.graph.nodes if n.op != "placeholder"), None)
        with nullcontext() if first is None else part.graph.inserting_before(first):
            made = part.graph.placeholder(like.name)
        made.meta.update({k: v for k, v in like.meta.items() if k in ("val", "tensor_meta")})
        part.inputs.append(key)
        part.slots.append(slot)
        return made

    def _give(self, part: _Part, node: Node) -> str:
        """Makes a value of a part one of its outputs; what may be a tensor that changes later is copied."""
        if node.name not in part.gives:
            made = self._value(part, node)
            if base_of(made, MAY_ALIAS).op == "placeholder":
                kept = part.graph.call_function(_aten.clone.default, (made,))
                kept.meta["val"] = form_apart(made.meta["val"])
                made = kept
            part.gives[node.name] = made
        return node.name

    def _result(self, value: Any) -> tuple[str, Any]:
        if not isinstance(value, Node):
            return "constant", value
        if value.target is _aten.copy_.default:
            value = argument(value, 0)
        holder = self._updated.get(value, value)
        if holder in self._holders:
            return "input", self._position[holder]
        part = self._parts[self._stage[value]]
        if value.name not in part.gives:
            part.gives[value.name] = self._value(part, value)
        return "given", value.name

    def _finish(self, part: _Part, update: Opaque | None, gradients: list[str]) -> Stage:
        for holder, slot in self._holders.items():
            # Sizes of the other inputs may be expressions of it.
            if not isinstance(holder.meta["val"], torch.Tensor):
                self._input(part, self._position[holder], holder, slot)
        for live, value, of_update in part.writes:  # after all that reads the tensors as they were
            written = part.graph.call_function(_aten.copy_.default, (live, value))
            written.meta["val"], written.meta[OF_UPDATE] = live.meta["val"], of_update
        part.graph.output(tuple(part.gives.values()))
        program = None
        if part.gives or any(n.op not in ("placeholder", "output") for n in part.graph.nodes):
            module = module_of(self._program.module, part.graph)
            module.meta.update(self._program.module.meta)
            part.graph.lint()
            program = Program(f"{self._program.name} {part.number + 1}", module, tuple(part.slots))
            program.voted = self._program.voted and not part.number
        return Stage(program, part.inputs, list(part.gives), update, gradients)


def _draws(node: Node) -> bool:
    tags = getattr(node.target, "tags", ()) if node.op == "call_function" else ()
    return torch.Tag.nondeterministic_seeded in tags
