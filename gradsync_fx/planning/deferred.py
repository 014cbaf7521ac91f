"""Where a window's sum can be taken earlier: ahead of linear work that is the same for every term.

leaf <- linear in g, coefficients made of parameters alone <- g, made of the micro-batch

sum_i L(g_i) = L(sum_i g_i): the g_i are summed in a sum of their own, and L runs once, when the window's gradient is
wanted. What a leaf gets beside that, by other paths, goes into its own sum as always.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping

from torch.fx import Node

from gradsync_fx.ir.dataflow import upstream
from gradsync_fx.ir.flops import bytes_of_value
from gradsync_fx.ir.linear import LinearIn
from gradsync_fx.ir.memory import base_of_views
from gradsync_fx.ir.ops import argument
from gradsync_fx.planning.kept import Deferred
from gradsync_fx.planning.worth import (
    Rates,
    adding,
    copying,
    is_view,
    seconds,
)


class Paths:
    """The linear paths to each leaf's gradient, with where on each the sum could be taken.

    markers: by leaf number. ends: leaf number to the nodes where its paths begin, with whether coefficients lie on the
    way from there.
    """

    def __init__(self, markers: Mapping[int, Node], linear: LinearIn) -> None:
        self._linear = linear
        self._scaled: dict[Node, bool] = {}
        self.ends: dict[int, dict[Node, bool]] = {}
        for leaf, marker in markers.items():
            self.ends[leaf] = {}
            self._follow(argument(marker, 0), False, self.ends[leaf], set())

    def _follow(self, node: Node, scaled: bool, ends: dict[Node, bool], seen: set[Node]) -> None:
        stack = [(node, scaled)]
        while stack:
            node, scaled = stack.pop()
            if not self._has_scaled(node):
                base = self._base(node)
                ends[base] = ends.get(base, False) or scaled
            elif node not in seen:
                seen.add(node)
                further = scaled or bool(self._linear.coefficients(node))
                stack.extend((n, further) for n in self._linear.inputs(node))

    def _base(self, node: Node) -> Node:
        """What a value is another look at."""
        while (
            is_view(node)
            and node.target is not operator.getitem
            and (found := self._linear.inputs(node))
        ):
            (node,) = found
        return node

    def _has_scaled(self, node: Node) -> bool:
        """Whether coefficients lie on a linear path to this node."""
        stack = [node]
        while stack:
            top = stack[-1]
            if top in self._scaled:
                stack.pop()
                continue
            inputs = self._linear.inputs(top)
            unknown = [n for n in inputs if n not in self._scaled]
            if unknown:
                stack.extend(unknown)
                continue
            mine = bool(inputs) and bool(self._linear.coefficients(top))
            self._scaled[top] = mine or any(self._scaled[n] for n in inputs)
        return self._scaled[node]

    def work(
        self, sources: Collection[Node], leaves: Collection[int], markers: Mapping[int, Node]
    ) -> set[Node]:
        """The linear nodes on paths from sources to these leaves."""
        reaching: dict[Node, bool] = {}

        def reaches(start: Node) -> bool:
            stack = [start]
            while stack:
                top = stack[-1]
                if top in reaching:
                    stack.pop()
                    continue
                if top in sources:
                    reaching[top] = True
                    continue
                unknown = [n for n in self._linear.inputs(top) if n not in reaching]
                if unknown:
                    stack.extend(unknown)
                    continue
                reaching[top] = any(reaching[n] for n in self._linear.inputs(top))
            return reaching[start]

        for leaf in leaves:
            reaches(argument(markers[leaf], 0))
        return {n for n, found in reaching.items() if found and n not in sources}


def find_deferred(
    markers: Mapping[int, Node],
    linear: LinearIn,
    roots: Collection[Node],
    rates: Rates,
) -> list[Deferred]:
    """Groups that save something in each call. roots: what an accumulate call needs beside the gradients.

    markers: of the leaves whose sums may be taken elsewhere. Groups share no leaf and no source.
    """
    paths = Paths(markers, linear)
    found = []
    live = upstream([*roots, *(argument(m, 0) for m in markers.values())])
    for leaves, sources in _groups(paths, markers, rates):
        others = {n: tuple(e for e in paths.ends[n] if e not in sources) for n in leaves}
        rest = [argument(m, 0) for leaf, m in markers.items() if leaf not in leaves]
        work = paths.work(sources, leaves, markers)
        kept = upstream([*roots, *rest, *(n for ends in others.values() for n in ends), *sources])
        ended = [markers[leaf] for leaf, ends in others.items() if not ends]
        grown = sum(adding(bytes_of_value(n), rates) for n in sources)
        shrunk = sum(adding(bytes_of_value(n), rates) for n in ended)
        coefficients = [n for node in work for n in linear.coefficients(node)]
        reads = tuple(dict.fromkeys(map(base_of_views, coefficients)))
        sums = sum(map(bytes_of_value, sources))
        held = sum(map(bytes_of_value, reads))
        found.append(
            Deferred(
                sources=tuple(sources),
                others=others,
                work=frozenset(work),
                reads=reads,
                saved=seconds(live - kept, rates) + shrunk - grown,
                # The sums are read, added to the last terms, handed to the work as values of their own, and emptied.
                once=seconds(work, rates) + copying(held + 3 * sums, rates) + shrunk,
            )
        )
    return found


def _groups(
    paths: Paths, markers: Mapping[int, Node], rates: Rates
) -> list[tuple[list[int], list[Node]]]:
    """Leaves that share a source, with their sources; a source that costs more than it could save is none."""
    reached: dict[Node, list[int]] = {}
    for leaf, ends in paths.ends.items():
        for node, scaled in ends.items():
            if scaled and _is_fixed(node):
                reached.setdefault(node, []).append(leaf)
    group_of: dict[int, tuple[list[int], list[Node]]] = {}
    for source, leaves in reached.items():
        work = paths.work([source], leaves, markers)
        most = seconds(work, rates)
        most += sum(adding(bytes_of_value(markers[leaf]), rates) for leaf in leaves)
        if adding(bytes_of_value(source), rates) >= most:
            continue
        joined: tuple[list[int], list[Node]] = ([], [source])
        for leaf in leaves:
            known = group_of.get(leaf)
            if known is None:
                joined[0].append(leaf)
            elif known is not joined:
                joined[0].extend(known[0])
                joined[1].extend(known[1])
            for one in joined[0]:
                group_of[one] = joined
    unique = {id(g): g for g in group_of.values()}
    return list(unique.values())


def _is_fixed(node: Node) -> bool:
    """Whether a value has the same shape in every call of the program."""
    return all(type(n) is int for n in node.meta["val"].shape)
