"""What is kept for a window: values that are computed once, and sums that are taken ahead of linear work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch.fx import Node

from gradsync_fx.ir.flops import bytes_of_value
from gradsync_fx.ir.program import Leaf


@dataclass(frozen=True, slots=True)
class Deferred:
    """One group of sums that are taken ahead of linear work.

    sources: what is summed. others: number of each leaf that gets something of it, to the nodes where its other paths
    begin; none where it gets nothing else. work: what runs once for a window. reads: the invariant
    values and placeholders that it reads. saved: seconds of one call; once: seconds that a window takes more.
    """

    sources: tuple[Node, ...]
    others: dict[int, tuple[Node, ...]]
    work: frozenset[Node]
    reads: tuple[Node, ...]
    saved: float
    once: float

    @property
    def bytes(self) -> int:
        """Of the sums."""
        return sum(map(bytes_of_value, self.sources))


@dataclass(frozen=True, slots=True)
class Invariants:
    """What is kept for one captured step; nodes are the step's own.

    found: all values that do not change inside a window, kept or not. held: nodes whose values are kept (placeholders:
    copies of parameters that the fold reads), in order. read: those of them that calls read. same: nodes that compute
    what a held one does. steady: placeholders that nothing writes inside a window. deferred: sums that are taken ahead
    of linear work. numbers: of those sums, which follow the leaves' numbers. watched: positions among the step's inputs
    of the tensors that all this is made of. saved: estimated seconds of one call, of `call` without it.
    """

    found: frozenset[Node] = frozenset()
    held: tuple[Node, ...] = ()
    read: frozenset[Node] = frozenset()
    same: dict[Node, Node] = field(default_factory=dict)
    steady: frozenset[Node] = frozenset()
    deferred: tuple[Deferred, ...] = ()
    numbers: dict[Node, int] = field(default_factory=dict)
    watched: tuple[int, ...] = ()
    saved: float = 0.0
    call: float = 0.0

    def key(self) -> tuple[str, ...]:
        """Equal for two choices for one step exactly when they keep the same."""
        return (*(n.name for n in self.held), "/", *(n.name for n in self.numbers))

    def name_of(self, node: Node) -> str:
        """Of a held value, for people."""
        op = getattr(getattr(node.target, "overloadpacket", None), "__name__", "copy")
        return f"{op} {self.held.index(node)}"

    def sums(self, leaves: Mapping[int, Leaf]) -> dict[int, Leaf]:
        """The sums that are taken early as leaves of their own, by number: each with the form of its terms."""
        found = {}
        for group in self.deferred:
            names = ", ".join(leaves[leaf].name for leaf in group.others)
            for i, source in enumerate(group.sources):
                name = f"sum for {names}" + (f" ({i + 1})" if i else "")
                number, form = self.numbers[source], torch.empty_like(source.meta["val"])
                found[number] = Leaf(number, name, form)
        return found


NOTHING = Invariants()
