"""The one rule of what is worth keeping for a window, in seconds that a model of the machine says.

a value is kept       when computing it in every call takes longer than computing it once and checking, in every call,
                      that nothing wrote what it is made of
a sum is taken        before linear work when doing that work in every call takes longer than the wider sum, and doing
before linear work    the work once more where the window closes
nothing is kept       where all of it saves less than `LEAST` of what the window's accumulate calls take

Costs are those of memory: what a fused group of pointwise ops reads and writes, what any other op reads and writes, and
its FLOPs. The constants are orders of magnitude of one core and of one accelerator: only ratios matter.
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.fx import Node

from gradsync_fx.ir.flops import bytes_of_value, flops_of
from gradsync_fx.ir.memory import base_of_views, viewed


# The part of the window's accumulate calls that has to be saved for anything to be kept.
LEAST = 0.05
# The same for what is made of the same parameters.
LEAST_OF_ONE = 0.0005
# How much longer torch's own kernels take for a byte than code that a compiler fuses; fake quantisation was measured.
# Merging and rounding by hand are fused, and cost less than a look at the parameters.
_NOT_FUSED = 3
_SLOWEST, _FAKE_QUANTISED = 20, "fake_quantize"
# The part of the free memory that kept values may take.
_OF_FREE_MEMORY = 0.25


@dataclass(frozen=True, slots=True)
class Rates:
    """flops, bandwidth: per second, FLOPs and bytes. sum_bandwidth: of sums over words, by which writes are seen on the
    CPU alone. launch: seconds to look at one tensor for that."""

    flops: float
    bandwidth: float
    sum_bandwidth: float
    launch: float


CORE = Rates(1e11, 4e10, 1.2e10, 2e-5)
ACCELERATOR = Rates(1e14, 2e12, math.inf, 1e-6)


def pays(gain: float, whole: float, least: float = 0.0) -> bool:
    """Whether something is kept that saves `gain` seconds of a window whose calls take `whole`."""
    return gain > least * whole


def rates_of(device: torch.device) -> Rates:
    """What the model takes a device for."""
    return CORE if device.type == "cpu" else ACCELERATOR


def seconds(nodes: Collection[Node], rates: Rates) -> float:
    """What it takes to compute these nodes, in one program, from what they read of others."""
    moved = flops = 0.0
    for node in nodes:
        if node.op != "call_function" or is_view(node):
            continue
        mine = flops_of(node)
        size = sum(bytes_of_value(n) for n in _inputs(node) if lies_in_memory(n))
        size += bytes_of_value(node) if lies_in_memory(node) else 0
        flops, moved = flops + mine, moved + (size if mine else _slowness(node) * size)
    return flops / rates.flops + moved / rates.bandwidth


def _slowness(node: Node) -> int:
    if _FAKE_QUANTISED in str(node.target):
        return _SLOWEST
    return 1 if _is_fused(node) or _reduces(node) else _NOT_FUSED


def copying(size: float, rates: Rates) -> float:
    """Seconds to read and write so many bytes."""
    return 2 * size / rates.bandwidth


def adding(size: float, rates: Rates) -> float:
    """Seconds to add so many bytes to a sum of the same size."""
    return 3 * size / rates.bandwidth


def checking(sizes: Iterable[int], rates: Rates) -> float:
    """Seconds to see whether any of these tensors, given in bytes, was written."""
    return sum(2 * size / rates.sum_bandwidth + rates.launch for size in sizes)


def memory_left(device: torch.device) -> float:
    """Bytes that kept values may take on a device; no limit where it is not there."""
    if device.type == "cpu":
        return _OF_FREE_MEMORY * _free_on_host()
    module = torch.get_device_module(device)
    return _OF_FREE_MEMORY * module.mem_get_info(device)[0] if module.is_available() else math.inf


def _free_on_host() -> float:
    """As the system says, what it would take back from its caches included."""
    told = Path("/proc/meminfo")
    if told.exists():
        for line in told.read_text().splitlines():
            name, _, rest = line.partition(":")
            if name == "MemAvailable":
                return float(rest.split()[0]) * 1024
    return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def is_view(node: Node) -> bool:
    """Whether a node computes nothing: another look at a tensor, an item of several."""
    return node.op == "call_function" and (
        node.target is operator.getitem or viewed(node.target) is not None
    )


def _inputs(node: Node) -> list[Node]:
    return list(dict.fromkeys(base_of_views(n) for n in node.all_input_nodes))


def lies_in_memory(node: Node) -> bool:
    """Whether a compiler writes a value down: it fuses pointwise ops into whatever reads them element by element."""
    return not _is_fused(node) or not all(_is_fused(u) or _reduces(u) for u in _readers(node))


def _readers(node: Node) -> Iterable[Node]:
    for user in node.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user


def _is_fused(node: Node) -> bool:
    tags = getattr(node.target, "tags", ())
    made = (
        node.op == "call_function" and not node.all_input_nodes
    )  # a constant is written where it is read
    return torch.Tag.pointwise in tags or made


def _reduces(node: Node) -> bool:
    return torch.Tag.reduction in getattr(node.target, "tags", ())
