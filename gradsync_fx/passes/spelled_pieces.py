"""What the two ops of comm/inplace_pieces.py stand for, as scatter.py spells it out: the proof runs these graphs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Graph, GraphModule, Node

from gradsync_fx.comm.cuts import Cuts
from gradsync_fx.ir.builder import Draft
from gradsync_fx.ir.ops import argument
from gradsync_fx.optim.shares import Portion
from gradsync_fx.passes.scatter import gather, scatter


@dataclass(frozen=True, slots=True)
class _Ranks:
    world: int
    rank: int


def cuts_of(node: Node) -> Cuts:
    """Whose the pieces are of one of the two ops."""
    numbers, rank = node.args[-2:]
    return Cuts.of(numbers, len(argument(node, 0)), int(rank))  # type: ignore[arg-type]


def spelled_scatter(node: Node) -> GraphModule:
    """Takes the sums that `start_pieces` is given; returns this rank's pieces of what they are on all ranks."""
    sums, group, wire, *_ = node.args
    draft, cuts = _draft(node), cuts_of(node)
    terms = [_placeholder(draft, n) for n in argument(node, 0)]
    ranks = _Ranks(cuts.world, cuts.rank)
    found = scatter(draft, ranks, _portions(cuts), terms, "sum", str(group), wire)  # type: ignore[arg-type]
    return _finished(draft, found)


def spelled_gather(node: Node) -> GraphModule:
    """Takes the pieces that `gather_pieces` is given; returns what the parameters are to be."""
    draft, cuts = _draft(node), cuts_of(node)
    mine = [_placeholder(draft, n) for n in argument(node, 1)]
    forms: list[torch.Tensor] = [n.meta["val"] for n in argument(node, 0)]
    ranks = _Ranks(cuts.world, cuts.rank)
    return _finished(draft, gather(draft, ranks, _portions(cuts), mine, forms, argument(node, 3)))


def _portions(cuts: Cuts) -> list[Portion]:
    found = []
    for bounds in cuts.bounds:
        owners = [r for r in range(cuts.world) if bounds[r + 1] - bounds[r] == bounds[-1]]
        found.append(Portion(bounds, owners[0] if owners else None))
    return found


def _draft(node: Node) -> Draft:
    mode = argument(node, 0)[0].meta["val"].fake_mode
    return Draft("", GraphModule({}, Graph()), [], {}, mode)


def _placeholder(draft: Draft, like: Node) -> Node:
    made = draft.graph.placeholder(f"given_{len(draft.graph.nodes)}")
    made.meta["val"] = like.meta["val"]
    return made


def _finished(draft: Draft, found: list[Node]) -> GraphModule:
    draft.graph.output(tuple(found))
    return draft.module
