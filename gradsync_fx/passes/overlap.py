"""What a compiler needs to see to hide communication: waits after all that does not need them, sums in place.

acc + g -> cat -> all_reduce -> wait -> slice -> update; acc = 0       becomes
acc = acc + g; start(accs of the bucket);  ...the rest of the backward...;  wait(accs); acc -> update; acc = 0

The all-reduce stays where it stood, after the bucket's last add.
"""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.comm.flat_buffers import stretches
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS
from gradsync_fx.ir import ops
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.dataflow import downstream
from gradsync_fx.ir.ops import argument
from gradsync_fx.ir.program import writes
from gradsync_fx.passes.fuse import resets
from gradsync_fx.passes.rewritten import Rewritten


_aten = torch.ops.aten
_CAST = torch.ops.prims.convert_element_type.default
# Where a bucket is one stretch of memory, and a collective takes it as it lies.
_IN_PLACE = ("cpu", "cuda")


def gradient_reductions(module: GraphModule) -> list[Node]:
    """The reductions of buckets, in their order."""
    return [node for node in module.graph.nodes if node.meta.get("bucket")]


def wait_late(rewritten: Rewritten) -> None:
    """Moves all that depends on a reduced bucket after what does not, and before the writes that end the program."""
    module = rewritten.main
    found = gradient_reductions(module)
    if not found:
        return
    # Inductor's own order of least memory starts all-reduces late.
    rewritten.settings["reorder_for_peak_memory"] = False
    reductions = [r for r in found if not r.meta["early"]]
    late = downstream(u for r in reductions for u in r.users)
    end = writes(module)[0]
    for node in list(module.graph.nodes):
        if node is end:
            break
        if node in late:
            end.prepend(node)


def reduce_in_place(rewritten: Rewritten) -> None:
    """Buckets of running sums that the program resets are sent as they lie; others stay as they are."""
    module, fake_mode = rewritten.main, rewritten.fake_mode
    zeroed = resets(module)
    for started in gradient_reductions(module):
        bucket = _bucket(started, zeroed) if started.target is ops.ALL_REDUCE else None
        if bucket is None:
            continue
        holders, totals, reduced = bucket
        for holder, total in zip(holders, totals, strict=True):
            if total is not holder:
                with module.graph.inserting_after(total):
                    copy = module.graph.call_function(_aten.copy_.default, (holder, total))
                copy.meta["val"] = holder.meta["val"]
        (waited,) = started.users
        wire = started.meta["val"].dtype
        with module.graph.inserting_before(started):
            emit(module.graph, fake_mode, START_SUMS, (holders, *started.args[1:], wire), {})
        with module.graph.inserting_before(waited):
            wait = emit(module.graph, fake_mode, WAIT_SUMS, (holders,), {})
        wait.meta["early"] = started.meta["early"]
        for holder, value in zip(holders, reduced, strict=True):
            if value is not None:
                value.replace_all_uses_with(holder)
        _erase_with_readers(waited)
        _erase_unread(started)
    module.recompile()


def _bucket(
    started: Node, zeroed: dict[Node, Node]
) -> tuple[list[Node], list[Node], list[Node | None]] | None:
    """Accumulators, what is reduced of each, and where the result of that is read; None for any other bucket."""
    flat = argument(started, 0)
    pieces = argument(flat, 0) if flat.target is _aten.cat.default else [flat]
    totals = [_total(piece) for piece in pieces]
    found = [running_sum(total, zeroed) for total in totals]
    holders = [holder for holder in found if holder is not None]
    if len(holders) < len(found):
        return None
    (waited,) = started.users
    reduced = _read(waited, [t.meta["val"] for t in totals])
    return None if reduced is None else (holders, totals, reduced)


def _is_sum(holder: Node, total: Node, zeroed: dict[Node, Node]) -> bool:
    """Whether a total is what a running sum becomes here, and may lie where that lies."""
    if total is not holder and total.target is not _aten.add.Tensor:
        return False
    form, value = holder.meta["val"], total.meta["val"]
    readers = [u for u in holder.users if u is not zeroed[holder]]
    lies_alike = form.dtype is value.dtype and form.shape == value.shape
    in_place = form.device.type in _IN_PLACE and form.numel()
    return bool(lies_alike and in_place and len(readers) == 1)


def running_sum(total: Node, zeroed: dict[Node, Node]) -> Node | None:
    """The running sum that a total can be added up in, in place; None where it cannot."""
    holder = total if total in zeroed else argument(total, 0) if total.args else total
    if holder not in zeroed or not _is_sum(holder, total, zeroed):
        return None
    return holder


def _total(piece: Node) -> Node:
    """What was flattened, and perhaps cast, for the wire."""
    if piece.target is _aten.constant_pad_nd.default:
        piece = argument(piece, 0)
    source: Node = argument(piece, 0)
    return argument(source, 0) if source.target is _CAST else source


def _read(waited: Node, forms: list[torch.Tensor]) -> list[Node | None] | None:
    """The ends of wait -> slice -> reshape (-> cast), by the position of the slice; None where it reads otherwise."""
    starts = [0]
    for size in stretches(forms):
        starts.append(starts[-1] + size)
    found: list[Node | None] = [None] * len(forms)
    for piece in waited.users:
        if piece.target is not _aten.slice.Tensor or argument(piece, 2) not in starts:
            return None
        place = starts.index(argument(piece, 2))
        (end,) = piece.users
        if end.meta["val"].dtype is not forms[place].dtype:
            (end,) = end.users
        found[place] = end
    return found


def _erase_with_readers(node: Node) -> None:
    for user in list(node.users):
        _erase_with_readers(user)
    node.graph.erase_node(node)


def _erase_unread(node: Node) -> None:
    """A node without readers, and what only it read, up to inputs and written sums."""
    sources = node.all_input_nodes
    node.graph.erase_node(node)
    for source in sources:
        if not source.users and source.op != "placeholder":
            _erase_unread(source)
