"""Where a GPU's program waits for its buckets: each right before what reads it, others' updates before that.

wait 0, wait 1, update 0, update 1, ...    ->    wait 0, update 0, wait 1, update 1, ...

What needs no bucket comes first, then what needs the first alone, and so on. A norm over all gradients needs all of
them: the sums of squares stand between the waits then, and the updates after the last. On a CPU the host waits between
update kernels (pointwise_updates.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.fx import Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.ir import ops
from gradsync_fx.ir.memory import order_by_memory
from gradsync_fx.passes.rewritten import Rewritten


_COPY = torch.ops.aten.copy_.default
_WAITS = (WAIT_SUMS, ops.WAIT)


def spread_waits(rewritten: Rewritten) -> None:
    """Moves waits, and what needs them, so that none stands before what can do without it."""
    graph = rewritten.main.graph
    nodes = [n for n in graph.nodes if n.op not in ("placeholder", "output")]
    start = next((i for i, n in enumerate(nodes) if _waits_on_gpu(n)), len(nodes))
    late = nodes[start:]
    place = _places(late)
    # Nothing is placed before what it needs: this order is one in which the program can run.
    (end,) = graph.find_nodes(op="output")
    for node in sorted(late, key=place.__getitem__):
        end.prepend(node)
    _delay(list(graph.nodes))
    rewritten.main.recompile()


def _places(late: list[Node]) -> dict[Node, tuple[int, ...]]:
    """The numbers of the waits that each needs, the last one first; by these they are sorted.

    A write goes after all that is made of what it ends, not only after its readers: compilers put reads off.
    """
    before = order_by_memory(late, free=(_COPY, *_WAITS))
    needs: dict[Node, tuple[int, ...]] = {}
    for number, node in enumerate(late):
        sources = (*node.all_input_nodes, *before[node])
        held = {wait for source in sources for wait in needs.get(source, ())}
        needs[node] = tuple(
            sorted(held | ({number} if _waits_on_gpu(node) else set()), reverse=True)
        )
    last = dict(needs)  # what all that is made of it needs
    for node in reversed(late):
        last[node] = max([needs[node], *(last[user] for user in node.users if user in last)])
    place: dict[Node, tuple[int, ...]] = {}
    for node in late:
        sources = (*node.all_input_nodes, *before[node])
        found = [needs[node], *(place[source] for source in sources if source in place)]
        if node.target is _COPY:
            found += [last[reader] for reader in before[node]]
        place[node] = max(found)
    return place


def _waits_on_gpu(node: Node) -> bool:
    return node.target in _WAITS and all(
        n.meta["val"].device.type == "cuda" for n in node.all_input_nodes
    )


def _delay(nodes: Iterable[Node]) -> None:
    """Each wait goes right before the first that reads what it waits for."""
    order = {node: i for i, node in enumerate(nodes)}
    for wait in [n for n in order if _waits_on_gpu(n)]:
        held = [wait] if wait.target is ops.WAIT else wait.all_input_nodes
        readers = [u for n in held for u in n.users if order[u] > order[wait] and u.op != "output"]
        if readers:
            min(readers, key=order.__getitem__).prepend(wait)
