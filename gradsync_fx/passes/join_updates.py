"""Updates of a bucket's parameters on a GPU, joined: kernels there take lists of tensors, and a launch each costs time.

adamw(p0, g0, m0, v0) -> p0', m0', v0'        p', m', v' = clone([p0', p1']), clone([m0', m1']), clone([v0', v1'])
adamw(p1, g1, m1, v1) -> p1', m1', v1'   ->   copies of p'[0], p'[1], m'[0], ...

Inductor makes one kernel of what is computed for the lists of an op of many tensors, and of the copies behind it; the
clones themselves are values in registers. Zeros for the sums are joined, too. An update by a function over flat views,
which serves on a CPU (pointwise_updates.py), would be a launch for each parameter.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx.comm.inplace_all_reduce import WAIT_SUMS
from gradsync_fx.ir.builder import emit
from gradsync_fx.ir.ops import argument
from gradsync_fx.passes.fuse import resets
from gradsync_fx.passes.pointwise_updates import scaling_of
from gradsync_fx.passes.rewritten import Rewritten


CAST = torch.ops.prims.convert_element_type.default
# Pointers of a launch: as Inductor has it by itself, and the most that 4 KB of arguments hold on any card and driver,
# beside some for numbers. The time that Triton takes grows faster than a kernel: the most is for buckets that need it.
_USUAL, _MOST = 250, 480
_FEW = 4  # launches
_UNLIMITED = 1 << 30
JOINED = torch.ops.aten._foreach_clone.default


def join_updates(rewritten: Rewritten) -> None:
    """Joins the calls of one body for the parameters of one bucket, and the zeroing of its sums."""
    module, fake_mode = rewritten.main, rewritten.fake_mode
    waits = module.graph.find_nodes(op="call_function", target=WAIT_SUMS)
    bucket = {total: wait for wait in waits for total in argument(wait, 0)}
    groups: dict[Any, list[Node]] = {}
    for call in module.graph.find_nodes(op="call_module"):
        body = module.get_submodule(str(call.target))
        assert isinstance(body, GraphModule)
        form = argument(call, 0).meta["val"]
        if body.meta.get("pointwise") and form.device.type == "cuda":
            key = (call.target, bucket.get(holder_of(argument(call, 1))), form.dtype)
            groups.setdefault(key, []).append(call)
    if groups:
        # Inductor counts what is read and written in registers, too, and would cut lists far below the limit.
        rewritten.settings["combo_kernel_max_num_args"] = _UNLIMITED
    for calls in [part for group in groups.values() for part in _launches(group)]:
        items: dict[int, list[Node]] = {}
        for call in calls:
            for item in call.users:
                items.setdefault(argument(item, 1), []).append(item)
        # What is computed of a clipped gradient is long: parts of it would be kernels of their own.
        gradients = [g for g in dict.fromkeys(argument(c, 1) for c in calls) if scaling_of(g)[1]]
        for values in [gradients, *items.values(), _zeros(module, fake_mode, calls)]:
            _join(module, fake_mode, values)
    module.recompile()


def _launches(calls: list[Node]) -> Iterator[list[Node]]:
    """Parts of as even a size as can be, of which each is one launch."""
    tensors = sum(n.meta["val"].dim() > 0 for n in calls[0].all_input_nodes)
    usual, most = (max(limit // (2 * tensors), 1) for limit in (_USUAL, _MOST))  # read and written
    parts = max(min(math.ceil(len(calls) / usual), _FEW), math.ceil(len(calls) / most))
    ends = [len(calls) * i // parts for i in range(parts + 1)]
    yield from (calls[start:end] for start, end in pairwise(ends))


def _zeros(module: GraphModule, fake_mode: Any, calls: list[Node]) -> list[Node]:
    """What the sums that these calls read are reset to, computed of each sum: so it is of the kernel that reads it.

    Nothing is less than itself. A constant would be a launch for each.
    """
    zeroed = resets(module)
    sums = dict.fromkeys(holder_of(argument(call, 1)) for call in calls)
    copies = [zeroed[total] for total in sums if total in zeroed]
    found = []
    first = next((n for n in module.graph.nodes if n in copies), None)
    for copy in copies:
        total = argument(copy, 0)
        assert first is not None
        with module.graph.inserting_before(first):
            less = emit(module.graph, fake_mode, torch.ops.aten.lt.Tensor, (total, total), {})
            zero = emit(module.graph, fake_mode, CAST, (less, total.meta["val"].dtype), {})
        copy.update_arg(1, zero)
        found.append(zero)
    return found


def holder_of(gradient: Node) -> Node:
    """The running sum that a gradient is made of, or what else it is made of."""
    total, _ = scaling_of(gradient)
    return argument(total, 0) if total.target is torch.ops.aten.add.Tensor else total


def _join(module: GraphModule, fake_mode: Any, values: list[Node]) -> None:
    """One op that gives all of these; left out where some are read before the last of them is there."""
    if len(values) < 2:
        return
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    last = max(values, key=order.__getitem__)
    readers = [[*value.users] for value in values]
    if any(order[user] < order[last] for users in readers for user in users):
        return
    with module.graph.inserting_after(last):
        many = module.graph.call_function(JOINED, (values,))
    many.meta["val"] = [_like(fake_mode, value) for value in values]
    place = many
    for i, (value, users) in enumerate(zip(values, readers, strict=True)):
        with module.graph.inserting_after(place):
            place = module.graph.call_function(operator.getitem, (many, i))
        place.meta["val"] = many.meta["val"][i]
        for user in users:
            user.replace_input_with(value, place)


def _like(fake_mode: Any, value: Node) -> torch.Tensor:
    with fake_mode:
        return torch.empty_like(value.meta["val"])
