"""What one rank has of updates that are shared out: its part of the state, the bytes that it sends for it, and the way
that buckets go.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from gradsync_fx.inspection.data import Sharing
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import Program
from gradsync_fx.optim.binding import Binding
from gradsync_fx.optim.shares import Portion
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.passes.scatter import ALL_GATHER, ALL_TO_ALL, REDUCE_SCATTER
from gradsync_fx.planning.plan import Bucket
from gradsync_fx.runtime.captured_step import CapturedStep


def sharing_of(captured: CapturedStep, boundary: Program) -> Sharing | None:
    """None where each rank makes the whole update."""
    facts = captured.facts
    if not facts.shares:
        return None
    names = {id(p): name for name, p in facts.capture.parameters.items()}
    cut: list[str] = []
    owners: dict[str, int] = {}
    here = whole = 0
    for binding in captured.programs.bindings.values():
        flat = parameters_of(binding.optimizer)
        for i, piece in _pieces(binding):
            name = names[id(flat[i])]
            if piece.owner is None:
                cut.append(name)
            else:
                owners[name] = piece.owner
        for mine, all_of_it in _state_bytes(binding, facts.setting.rank):
            here, whole = here + mine, whole + all_of_it
    sent = {"sums": 0, "parameters": 0, "others": 0}
    for node in boundary.module.graph.nodes:
        if "origin" not in node.meta or node.meta.get("made_by"):
            sent[_what(node)] += _sent(node, facts.setting.rank, facts.setting.world)
    return Sharing(
        state_bytes=here,
        whole_state_bytes=whole,
        sums_bytes=sent["sums"],
        parameters_bytes=sent["parameters"],
        other_bytes=sent["others"],
        cut=tuple(cut),
        owners=owners,
    )


def way_of(captured: CapturedStep, bucket: Bucket) -> str:
    """How a bucket's terms reach other ranks, as `Collective.way` says it."""
    if bucket not in captured.facts.shareable:
        return "wire"
    if not captured.settled:
        return "memory or wire"
    buckets = captured.runner.buckets
    if not buckets.in_memory(captured.runner.sums_of(bucket)):
        return "wire"
    done = [one.sums for one in captured.programs.journal.exchanged.values()]
    return _way(captured, bucket, done) if captured.facts.shares else "memory"


def way_back_of(captured: CapturedStep, bucket: Bucket) -> str:
    """Likewise its new parameters, of `Collective.way_back`."""
    facts = captured.facts
    if not facts.shares:
        return ""
    names = _names(captured, bucket)
    if not all(name in facts.gathered_in_memory for name in names):
        return "wire"
    if not captured.settled:
        return "memory or wire"
    if not captured.runner.buckets.gathers_in_memory(names):
        return "wire"
    done = [one.parameters for one in captured.programs.journal.exchanged.values()]
    return _way(captured, bucket, done)


def _way(captured: CapturedStep, bucket: Bucket, done: list[tuple[str, ...]]) -> str:
    """Where ranks reach each other's memory. done: what programs exchange there, by name."""
    named = [any(name in some for some in done) for name in _names(captured, bucket)]
    return "memory" if all(named) else "memory and wire" if any(named) else "wire"


def _names(captured: CapturedStep, bucket: Bucket) -> list[str]:
    return [captured.facts.capture.step.leaves[i].name for i in bucket.leaves]


def _pieces(binding: Binding) -> Iterator[tuple[int, Portion]]:
    assert binding.shares is not None
    for i in binding.which:
        if i in binding.shares.pieces:
            yield i, binding.shares.pieces[i]


def _state_bytes(binding: Binding, rank: int) -> Iterator[tuple[int, int]]:
    """Of each tensor of the state: what is here, and what it is in all."""
    flat, state = parameters_of(binding.optimizer), binding.state()
    pieces = dict(_pieces(binding))
    for i, held in state.items():
        for value in held.values():
            if not isinstance(value, torch.Tensor):
                continue
            size, piece, share = value.numel() * value.itemsize, pieces.get(i), binding.shares
            if piece is None or share is None:
                yield size, size
            elif piece.owner is not None:
                mine = piece.owner == rank or not share.is_apart(piece, flat[i], value)
                yield size if mine else 0, size
            elif value.shape == flat[i].shape or share.is_piece(piece, flat[i], value):
                yield piece.size(rank) * value.itemsize, piece.elements * value.itemsize
            else:
                yield size, size


def _what(node: Node) -> str:
    if node.meta.get("bucket"):
        return "sums"
    return "parameters" if node.meta.get("made_by") == "inline_updates" else "others"


def _sent(node: Node, rank: int, world: int) -> int:
    """Bytes that a rank sends in a collective of its share: to each other rank what that one is to have."""
    if node.target not in (ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER):
        return 0
    (given,) = node.all_input_nodes[:1]
    value = given.meta["val"]
    if node.target is ALL_TO_ALL:
        lengths = list(argument(node, 2))
        return (sum(lengths) - lengths[rank]) * value.itemsize
    share = value.numel() // world if node.target is REDUCE_SCATTER else value.numel()
    return share * (world - 1) * value.itemsize
