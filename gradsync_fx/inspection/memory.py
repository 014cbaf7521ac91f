"""Peak memory of a program, from the liveness of its values: an estimate without running or compiling it.

peak = what the step holds between calls  +  the most bytes of values that live at one time in the program

Which values come to be is told by how Inductor fuses: products, convolutions, attention, reductions and what these
read are written to memory; what is computed element by element goes into the kernels that read it, unless it is read
twice and costs much to compute again. A kernel that reads a value for the last time may write its result over it. The
order is the graph's; where Inductor finds one that needs less, the estimate is too high.

Not in it: the allocator's own rounding, a GPU's context, workspaces of libraries (but for the copies of oneDNN's
convolutions).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from gradsync_fx._torch import OpOverload
from gradsync_fx.inspection.tensors import size_in_bytes
from gradsync_fx.ir.memory import base_of_views, viewed
from gradsync_fx.ir.program import writes


_aten = torch.ops.aten
Size = Callable[[Node], int]
_COPY = _aten.copy_.default
_REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "var", "var_mean", "prod", "any", "all"})
# No arithmetic of their own: an index into what they read, or a number.
_INDEXED = frozenset(
    {
        "_to_copy", "clone", "reshape", "_unsafe_view", "convert_element_type", "full", "full_like", "empty_like",
        "zeros_like", "constant_pad_nd", "iota", "gather", "embedding", "index", "cat", "_unsafe_masked_index",
        "broadcast_in_dim", "inductor_lookup_seed", "inductor_random",
    }
)  # fmt: skip
# When Inductor writes down what is read more than once: config.realize_reads_threshold, realize_opcount_threshold, its
# list of heavy ops on the CPU; and realize_acc_reads_threshold for what is read once.
_READS, _OPS, _HEAVY, _MOST_READS = 4, 30, frozenset({"exp", "sigmoid"}), 8


@dataclass(frozen=True, slots=True)
class Peak:
    """The most bytes that values of a program take at one time, and the node that is computed then."""

    bytes: int
    node: Node | None


def peak_of(module: GraphModule, size: Size | None = None) -> Peak:
    """The peak of a program's graph beside its inputs. size: bytes of a node's value, from its shape unless given."""
    return max(levels_over(module, size), key=lambda level: level.bytes, default=Peak(0, None))


def levels_over(module: GraphModule, size: Size | None = None) -> Iterator[Peak]:
    """The most bytes while each node of a program is computed, in the graph's order."""
    size = size or value_bytes
    sources = _written_down(module)
    last = _last_reads(module, sources)
    living: dict[Node, int] = {}
    ends = set(writes(module))  # into inputs, which are there already
    now = 0
    for node, reads in sources.items():
        own = 0 if node in ends else size(node)
        ending = [s for s in reads if last[s] is node and s in living]
        if own and (_is_elementwise(node) or _name(node) in _REDUCTIONS):
            over = next((s for s in ending if living[s] == own), None)
            now -= living.pop(over, 0) if over is not None else 0
        living[node] = own
        now += own
        yield Peak(now + _beside(node, size), node)
        ending += [] if node in last else [node]
        now -= sum(living.pop(s, 0) for s in ending)


def value_bytes(node: Node) -> int:
    """Of the tensor that a node gives; 0 for several at once, whose items are nodes of their own."""
    value = node.meta.get("val")
    return size_in_bytes(value) if isinstance(value, torch.Tensor) else 0


def _written_down(module: GraphModule) -> dict[Node, set[Node]]:
    """The nodes whose values come to be, in their order, each with those that it reads: through all that is fused."""
    readers: dict[Node, list[Node]] = {}
    for node in module.graph.nodes:
        if not _is_view(node):
            for given in node.all_input_nodes:
                readers.setdefault(base_of_views(given), []).append(node)
    found: dict[Node, set[Node]] = {}
    fused: dict[Node, tuple[set[Node], int]] = {}
    for node in module.graph.nodes:
        if node.op != "call_function" or _is_view(node):
            continue
        reads: set[Node] = set()
        ops = 1
        for given in map(base_of_views, node.all_input_nodes):
            through, count = fused.get(given, ({given}, 0))
            reads |= through
            ops += count
        if _is_fused(node, readers.get(node, []), len(reads), ops):
            fused[node] = reads, ops
        else:
            found[node] = reads
    return found


def _is_fused(node: Node, readers: list[Node], reads: int, ops: int) -> bool:
    if not _is_elementwise(node) or reads > _MOST_READS:
        return False
    if any(not (_reads_by_element(u) or u.target is _COPY) for u in readers):
        return False  # a library's kernel reads memory, and so does the caller
    heavy = _name(node) in _HEAVY and _on_cpu(node)
    return len(readers) < 2 or not (reads > _READS or ops > _OPS or heavy)


def _last_reads(module: GraphModule, sources: dict[Node, set[Node]]) -> dict[Node, Node]:
    last: dict[Node, Node] = {}
    for node, reads in sources.items():
        last.update(dict.fromkeys(reads, node))
    (out,) = module.graph.find_nodes(op="output")
    last.update(dict.fromkeys(map(base_of_views, out.all_input_nodes), out))
    return last


def _beside(node: Node, size: Size) -> int:
    """What a kernel takes while it runs, beside its result: oneDNN copies what it is given into a layout of its own."""
    if not _on_cpu(node):
        return 0
    if node.target is _aten.convolution.default:
        return size(node)
    if node.target is _aten.convolution_backward.default:
        gradient: Any = node.args[0]
        return size(gradient) + sum(map(size, node.users))
    return 0


def _on_cpu(node: Node) -> bool:
    return all(v.device.type == "cpu" for v in _tensors(node.meta.get("val")))


def _tensors(value: Any) -> Iterable[torch.Tensor]:
    values = value if isinstance(value, list | tuple) else (value,)
    return (v for v in values if isinstance(v, torch.Tensor))


def _is_view(node: Node) -> bool:
    return (
        node.op == "call_function"
        and node.target is not operator.getitem
        and viewed(node.target) is not None
    )


def _is_elementwise(node: Node) -> bool:
    if node.op != "call_function":
        return False
    if torch.Tag.pointwise in getattr(node.target, "tags", ()) or _name(node) in _INDEXED:
        return True
    onto = node.args[0] if node.args else None
    if node.target is operator.getitem and isinstance(onto, Node):
        node = onto
    if _name(node).startswith("_foreach_"):  # one op for many tensors, and its results
        return True
    # One value at places of a constant: a comparison of indices.
    return _name(node) == "scatter" and isinstance(onto, Node) and _name(onto) == "full"


def _reads_by_element(node: Node) -> bool:
    return _is_elementwise(node) or _name(node) in _REDUCTIONS


def _name(node: Node) -> str:
    target = node.target
    return target._schema.name.partition("::")[2] if isinstance(target, OpOverload) else ""
