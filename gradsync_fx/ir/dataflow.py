"""Which nodes of a graph depend on which, asked and changed in time linear in the graph."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping

from torch.fx import Graph, Node, map_arg


def downstream(
    sources: Iterable[Node],
    without: Collection[Node] = (),
    through: Callable[[Node], bool] | None = None,
) -> set[Node]:
    """Sources and all that is reachable from them by uses, on paths that avoid `without`.

    through: which nodes other than sources count, and are followed further.
    """
    return _reached(sources, without, through, lambda node: node.users)


def upstream(
    nodes: Iterable[Node],
    without: Collection[Node] = (),
    through: Callable[[Node], bool] | None = None,
) -> set[Node]:
    """Nodes and all that they are reachable from; `without` and `through` as in `downstream`."""
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


def read_instead(changed: Mapping[Node, Node]) -> None:
    """Lets all that reads a node read what that maps to, which itself goes on with what it reads.

    Each reader is written once: an update reads as many gradients as there are parameters.
    """
    readers: dict[Node, dict[Node, Node]] = {}
    for old, new in changed.items():
        for reader in old.users:
            if reader is not new:
                readers.setdefault(reader, {})[old] = new
    for reader, read in readers.items():

        def now(node: Node, read: Mapping[Node, Node] = read) -> Node:
            return read.get(node, node)

        reader.args, reader.kwargs = map_arg(reader.args, now), map_arg(reader.kwargs, now)


class Nearest:
    """For every node the stops that reach it on a path without another stop in between.

    One sweep over the graph in its order, with a bit set of stops for each node.
    """

    def __init__(self, graph: Graph, stops: Collection[Node]) -> None:
        self._bit = {node: 1 << i for i, node in enumerate(stops)}
        self._stops = list(self._bit)
        self._nearest: dict[Node, int] = {}
        self._decoded: dict[int, frozenset[Node]] = {0: frozenset()}
        for node in graph.nodes:
            self._nearest[node] = self._read(node)

    def _read(self, node: Node) -> int:
        found = 0
        for source in node.all_input_nodes:
            found |= self._bit.get(source) or self._nearest[source]
        return found

    def of(self, value: object) -> frozenset[Node]:
        """A stop is its own nearest; constants have none."""
        if not isinstance(value, Node):
            return self._decoded[0]
        bits = self._bit.get(value) or self._nearest[value]
        if bits not in self._decoded:
            self._decoded[bits] = frozenset(
                stop for i, stop in enumerate(self._stops) if bits >> i & 1
            )
        return self._decoded[bits]

    def of_inputs(self, node: Node) -> frozenset[Node]:
        """The nearest stops of a node's inputs; of a stop, those before it and not itself."""
        return frozenset[Node]().union(*(self.of(source) for source in node.all_input_nodes))
