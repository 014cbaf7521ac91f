"""Data flow in a graph: what depends on what, in time that grows with the graph and not with the questions."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from torch.fx import Graph, Node


def downstream(
    sources: Iterable[Node],
    without: Collection[Node] = (),
    through: Callable[[Node], bool] | None = None,
) -> set[Node]:
    """Sources and all that depends on them, other than by way of `without`.

    through: which nodes that are no sources count, and are followed further.
    """
    return _reached(sources, without, through, lambda node: node.users)


def upstream(
    nodes: Iterable[Node],
    without: Collection[Node] = (),
    through: Callable[[Node], bool] | None = None,
) -> set[Node]:
    """Nodes and all that they depend on; `without` and `through` as in `downstream`."""
    return _reached(nodes, without, through, lambda node: node.all_input_nodes)


def _reached(
    start: Iterable[Node],
    without: Collection[Node],
    through: Callable[[Node], bool] | None,
    next_to: Callable[[Node], Iterable[Node]],
) -> set[Node]:
    reached = {node for node in start if node not in without}
    stack = list(reached)
    while stack:
        for node in next_to(stack.pop()):
            if node not in reached and node not in without and (through is None or through(node)):
                reached.add(node)
                stack.append(node)
    return reached


class Nearest:
    """For every node the nodes of `stops` that it depends on first; what lies behind them does not count.

    One sweep over the graph, with a bit for each stop.
    """

    def __init__(self, graph: Graph, stops: Collection[Node]) -> None:
        self._bit = {node: 1 << i for i, node in enumerate(stops)}
        self._stops = list(self._bit)
        self._behind: dict[Node, int] = {}
        self._decoded: dict[int, frozenset[Node]] = {0: frozenset()}
        for node in graph.nodes:
            self._behind[node] = self._read(node)

    def _read(self, node: Node) -> int:
        found = 0
        for source in node.all_input_nodes:
            found |= self._bit.get(source) or self._behind[source]
        return found

    def of(self, value: object) -> frozenset[Node]:
        """A stop is its own nearest; constants have none."""
        if not isinstance(value, Node):
            return self._decoded[0]
        bits = self._bit.get(value) or self._behind[value]
        if bits not in self._decoded:
            self._decoded[bits] = frozenset(
                stop for i, stop in enumerate(self._stops) if bits >> i & 1
            )
        return self._decoded[bits]

    def behind(self, node: Node) -> frozenset[Node]:
        """What the inputs of a node depend on first, also where it is a stop itself."""
        return frozenset[Node]().union(*(self.of(source) for source in node.all_input_nodes))
