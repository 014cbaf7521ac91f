"""Data flow: reached nodes, and the stops that each node depends on first."""

from __future__ import annotations

import torch
from torch.fx import Graph

from gradsync_fx.ir.dataflow import Nearest, downstream, upstream


def test_reached_nodes_and_nearest_stops() -> None:
    """a -> s -> b -> t -> c, and a -> c: s lies behind t, seen from c."""
    graph = Graph()
    a = graph.placeholder("a")
    s = graph.call_function(torch.neg, (a,))
    b = graph.call_function(torch.neg, (s,))
    t = graph.call_function(torch.neg, (b,))
    c = graph.call_function(torch.add, (a, t))
    graph.output((c,))
    assert downstream([b], without=[c]) == {b, t}
    assert upstream([c], without=[t]) == {c, a}
    nearest = Nearest(graph, [s, t])
    assert nearest.of(c) == {t}
    assert nearest.of(b) == nearest.of(s) == nearest.of_inputs(t) == {s}
    assert nearest.of(a) == nearest.of(3) == frozenset()
