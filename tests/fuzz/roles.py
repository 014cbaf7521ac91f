"""The specification of a step's parts, from the roles that its maker gave to its nodes; nothing of the library decides.

It speaks of values and not of cuts: what a value depends on says in which programs it can be given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.fx import Node

from gradsync_fx.ir import ops
from gradsync_fx.ir.program import Kind
from tests.fuzz.graphs import Made


@dataclass(frozen=True)
class Role:
    """What a value depends on.

    gradient: a window's gradient, other than through an update. updated: an update. data: this call's data, other than
    through gradients and updates. own: tensors of the user, other than through gradients. stops: the gradients and
    updates that it depends on first.
    """

    gradient: bool = False
    updated: bool = False
    data: bool = False
    own: bool = False
    stops: frozenset[Node] = frozenset()

    def __or__(self, other: Role) -> Role:
        return Role(
            self.gradient or other.gradient,
            self.updated or other.updated,
            self.data or other.data,
            self.own or other.own,
            self.stops | other.stops,
        )


class Roles:
    """The roles of all nodes, and the parts of the window."""

    def __init__(self, made: Made) -> None:
        self.made = made
        graph, slots = made.capture.step.module.graph, made.capture.step.slots
        (out,) = graph.find_nodes(op="output")
        self.results = list(out.args[0])
        self.writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        self.kinds = {
            n: s.kind for n, s in zip(graph.find_nodes(op="placeholder"), slots, strict=True)
        }
        targets = {w.args[0] for w in self.writes}
        self.of: dict[Node, Role] = {}
        for node in graph.nodes:
            role = Role()
            for source in node.all_input_nodes:
                role = role | self.of[source]
            if self.kinds.get(node) is Kind.DATA:
                role = Role(data=node not in targets, own=True)
            elif made.markers.get(node, (0, False))[1]:
                role = Role(gradient=True, updated=role.updated, stops=frozenset({node}))
            elif node in made.updates:
                role = Role(updated=True, own=role.own, stops=frozenset({node}))
            self.of[node] = role
        self.live = self._live(out)
        self.cuts = [n for n, (_, whole) in made.markers.items() if whole and n in self.live]
        self.leaf = {n: made.markers[n][0] for n in self.cuts}
        self.apart = made.sketch.apart and self._separable()

    def _live(self, out: Node) -> set[Node]:
        # Collectives are effects: they stay, whoever uses their results.
        sent = [n for n in out.graph.nodes if ops.is_collective(n)]
        live, stack = set[Node](), [out, *self.writes, *sent]
        while stack:
            node = stack.pop()
            if node not in live:
                live.add(node)
                stack.extend(node.all_input_nodes)
        return live

    def _separable(self) -> bool:
        """Whether each optimizer can have a window of its own: no update reads another's gradients."""
        owner = self._owner()
        if len(self.made.updates) < 2 or any(leaf not in owner for leaf in self.leaf.values()):
            return False
        for update, which in self.made.updates.items():
            for gradient in update.args[3]:  # type: ignore[union-attr]
                for stop in self.of[gradient].stops:  # type: ignore[index]
                    if stop not in self.leaf or owner[self.leaf[stop]] != which:
                        return False
        return True

    def _owner(self) -> dict[int, int]:
        tensors = [leaf.parameter for leaf in self.made.capture.step.leaves.values()]
        return {
            i: which
            for which, optimizer in enumerate(self.made.capture.optimizers)
            for i, tensor in enumerate(tensors)
            if any(tensor is p for p in optimizer.param_groups[0]["params"])
        }

    @property
    def parts(self) -> range:
        return range(len(self.made.capture.optimizers) if self.apart else 1)

    def part_of_leaf(self, leaf: int) -> int:
        return self._owner()[leaf] if self.apart else 0

    def part(self, stop: Node) -> int:
        if not self.apart:
            return 0
        return (
            self.made.updates[stop]
            if stop in self.made.updates
            else self.part_of_leaf(self.leaf[stop])
        )

    def waits(self, node: Node, closing: frozenset[int]) -> bool:
        """Whether what depends on these stops cannot be had in a program that closes these parts."""
        return not closing or any(self.part(s) not in closing for s in self.of[node].stops)

    def at_the_boundary(self, node: Node) -> bool:
        """Whether this output is the boundary's."""
        role = self.of[node]
        return role.gradient or (role.updated and not role.data)

    def written_at_the_boundary(self, write: Node) -> bool:
        target, value = write.args[:2]
        kind, role = self.kinds[target], self.of[value]  # type: ignore[index]
        each_call = kind is Kind.BUFFER and role.data
        alone = kind is Kind.PARAMETER and not role.data
        return alone or role.gradient or (role.updated and not each_call)

    def tail_gives(self, node: Node) -> bool:
        """Whether an update without a micro-step has this output."""
        later = [w for w in self.writes if self.written_at_the_boundary(w)]
        return self.at_the_boundary(node) and node not in later and not self.of[node].own

    @property
    def read_early(self) -> bool:
        """Whether a window of several micro-steps would mean something else than one of one."""
        leaves = list(self.leaf.values())
        return len(leaves) > len(set(leaves)) or self._any(lambda role: role.gradient)

    @property
    def weights_come_late(self) -> bool:
        """Whether a weight, a loss or a gradient is known only when an update of the same call was made."""
        noted = self.made.noted
        values = [*noted.get(ops.Role.WEIGHT, []), *noted.get(ops.Role.LOSS, [])]
        return self._any(lambda role: bool(role.stops)) or any(self.of[v].stops for v in values)

    def _any(self, holds: Callable[[Role], bool]) -> bool:
        return any(holds(self.of[source]) for cut in self.cuts for source in cut.all_input_nodes)
