"""A graph of ATen ops as plain data, and back: numbers, texts and lists, which reading neither unpickles nor runs.

    graph -> nodes (op, name, target by name, arguments, what is known of the result) -> graph

What a node is known by is kept as it is: the form of its value, and which values lie in one storage; the user's line
and module, as positions among `Origins`, so that the line is the one that it has now. What has no form here raises
`UnwritableGraph`: such a graph is not kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from gradsync_fx._torch import FakeTensor, OpOverload
from gradsync_fx._torch_aot import FakeMemory, TensorMetadata, memory_key, plain_fake
from gradsync_fx.ir.graph_copy import give_arguments, module_of


class UnwritableGraph(Exception):
    """A graph that holds what has no form as data. It says what."""


# Ops whose meaning is that of torch's and this package's version.
NAMESPACES = ("aten", "prims", "_c10d_functional", "gradsync_fx")

# Kept as they are, and those that no stage after the capture reads.
_PLAIN = ("seq_nr", "autograd_backward", "partitioner_tag", "ac_graph_id")
_LEFT_OUT = ("desc", "source_fn_stack", "fwd_source_fn_stack", "from_node")
_CONSTANTS: dict[type, Callable[[str], Any]] = {
    torch.dtype: lambda name: getattr(torch, name),
    torch.layout: lambda name: getattr(torch, name),
    torch.memory_format: lambda name: getattr(torch, name),
    torch.device: torch.device,
}
_BY_NAME = {kind.__name__: make for kind, make in _CONSTANTS.items()}


class Origins:
    """Where nodes come from: the stack traces and the stacks of modules of Dynamo's graph, each once, in order."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.traces: list[str] = []
        self.stacks: list[Any] = []
        self._trace: dict[str, int] = {}
        self._stack: dict[Any, int] = {}
        self.pattern: list[tuple[int, int]] = []
        for node in nodes:
            trace, stack = node.meta.get("stack_trace") or "", node.meta.get("nn_module_stack")
            at = -1 if not trace else self._trace.setdefault(trace, len(self.traces))
            if at == len(self.traces):
                self.traces.append(trace)
            key = tuple(stack.items()) if stack else ()
            within = -1 if not stack else self._stack.setdefault(key, len(self.stacks))
            if within == len(self.stacks):
                self.stacks.append(stack)
            self.pattern.append((at, within))

    def trace(self, text: str) -> int:
        """The position of a stack trace."""
        if text not in self._trace:
            raise UnwritableGraph("a node of a line that Dynamo did not see")
        return self._trace[text]

    def stack(self, modules: dict[str, Any]) -> int:
        """The position of a stack of modules."""
        key = tuple(modules.items())
        if key not in self._stack:
            raise UnwritableGraph("a node of modules that Dynamo did not see")
        return self._stack[key]


def constant_as_data(value: Any, node: Callable[[Node], int]) -> Any:
    """An argument of a node. node: gives the position of another one."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, Node):
        return {"node": node(value)}
    if type(value) in _CONSTANTS:
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is ...:
        return {"ellipsis": None}
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [constant_as_data(v, node) for v in parts]}
    if isinstance(value, list | tuple):
        if not isinstance(value, list) and type(value) not in (tuple, torch.Size):
            raise UnwritableGraph(f"a constant of type {type(value).__name__}")
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [constant_as_data(v, node) for v in value]}
    if isinstance(value, dict) and all(type(k) is str for k in value):
        return {"dict": {k: constant_as_data(v, node) for k, v in value.items()}}
    if isinstance(value, OpOverload):
        return {"op": target_as_data(value)}
    raise UnwritableGraph(f"a constant of type {type(value).__name__}")


def target_as_data(target: Any) -> str:
    """An op by its name."""
    if target is operator.getitem:
        return "getitem"
    if isinstance(target, OpOverload) and target.namespace in NAMESPACES:
        return str(target.name())
    raise UnwritableGraph(f"the op {target}")


def graph_as_data(module: GraphModule, origins: Origins) -> dict[str, Any]:
    """Data that `graph_from_data` makes an equal graph of. Raises `UnwritableGraph`."""
    at: dict[Node, int] = {}
    storages: dict[int, int] = {}
    nodes: list[Any] = []
    for node in module.graph.nodes:
        if node.op not in ("placeholder", "call_function", "output") or node.type is not None:
            raise UnwritableGraph(f"a node of the kind {node.op}")
        target = target_as_data(node.target) if node.op == "call_function" else str(node.target)
        given = constant_as_data((node.args, node.kwargs), at.__getitem__)
        nodes.append([node.op, node.name, target, given, _meta_as_data(node, origins, storages)])
        at[node] = len(at)
    return {"nodes": nodes}


def _meta_as_data(node: Node, origins: Origins, storages: dict[int, int]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if "val" in node.meta:
        found["val"] = _value_as_data(node.meta["val"], storages)
    for key, value in node.meta.items():
        if key == "val":
            continue
        if key == "stack_trace":
            found[key] = origins.trace(value)
        elif key == "nn_module_stack":
            found[key] = origins.stack(value)
        elif key == "tensor_meta":
            found[key] = _described(value, node.meta["val"])
        elif key == "original_aten":
            found[key] = target_as_data(value)
        elif key == "recompute" and isinstance(value, CheckpointPolicy):
            found[key] = value.name
        elif key in _PLAIN and (value is None or type(value) in (bool, int, str)):
            found[key] = value
        elif key == "eager_input_vals" and getattr(node.target, "namespace", "") == "gradsync_fx":
            continue  # for Inductor, which sees no marker
        elif key not in _LEFT_OUT:
            raise UnwritableGraph(f"what is known of a node as {key!r}")
    return found


def _value_as_data(value: Any, storages: dict[int, int]) -> Any:
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [_value_as_data(v, storages) for v in value]}
    if not isinstance(value, torch.Tensor) or not plain_fake(value):
        raise UnwritableGraph(f"a value of type {type(value).__name__}")
    numbers = [*value.shape, *value.stride(), value.storage_offset()]
    nbytes = value.untyped_storage().nbytes()
    if value.requires_grad or any(type(n) is not int for n in (*numbers, nbytes)):
        raise UnwritableGraph("a value of symbolic shape, or with a gradient")
    storage = storages.setdefault(memory_key(value), len(storages))
    dtype, device = str(value.dtype).removeprefix("torch."), str(value.device)
    form = [dtype, device, list(value.shape), list(value.stride()), value.storage_offset()]
    return {"tensor": [storage, nbytes, *form]}


def _described(about: Any, value: Any) -> Any:
    """What torch's own summary of a value says beyond its form."""
    form = (value.shape, value.dtype, value.stride())
    if not isinstance(about, TensorMetadata) or about.is_quantized:
        raise UnwritableGraph("a summary of a value that is no tensor's")
    if (about.shape, about.dtype, about.stride) != form or about.qparams:
        raise UnwritableGraph("a summary of another value")
    return [bool(about.requires_grad), constant_as_data(about.memory_format, _no_node)]


def _no_node(node: Node) -> int:
    raise UnwritableGraph(f"the node {node} where a constant belongs")


def constant_from_data(data: Any, nodes: list[Node]) -> Any:
    """What `constant_as_data` was given."""
    if not isinstance(data, dict):
        return data
    ((kind, held),) = data.items()
    if kind == "node":
        return nodes[held]
    if kind in ("list", "tuple"):
        values = [constant_from_data(v, nodes) for v in held]
        return values if kind == "list" else tuple(values)
    if kind == "dict":
        return {k: constant_from_data(v, nodes) for k, v in held.items()}
    if kind == "slice":
        return slice(*(constant_from_data(v, nodes) for v in held))
    if kind in ("float", "ellipsis"):
        return float(held) if kind == "float" else ...
    return target_from_data(held) if kind == "op" else _BY_NAME[kind](held)


def target_from_data(name: str) -> Any:
    """The op of this name. Raises `AttributeError` where there is none."""
    if name == "getitem":
        return operator.getitem
    namespace, _, op = name.partition("::")
    if namespace not in NAMESPACES:
        raise AttributeError(name)
    op, _, overload = op.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), op), overload or "default")


def graph_from_data(data: dict[str, Any], fake_mode: Any, origins: Origins) -> GraphModule:
    """The graph, its values in this mode. origins: of a graph of the same pattern.

    Raises `LookupError`, `AttributeError`, `TypeError`, `ValueError` or `RuntimeError` for what is no such data.
    """
    graph, memory = Graph(), FakeMemory(fake_mode)
    made: list[Node] = []
    targets: dict[str, Any] = {}
    for op, name, target, given, about in data["nodes"]:
        if op == "call_function" and target not in targets:
            targets[target] = target_from_data(target)
        args, kwargs = map_arg(constant_from_data(given, made), _same_node)
        node = graph.create_node(
            op, targets[target] if op == "call_function" else target, name=name
        )
        if node.name != name:
            raise ValueError(f"{name} is a name twice")
        give_arguments(node, args, kwargs)
        node.meta.update(_meta_from_data(about, memory, origins, targets))
        made.append(node)
    return module_of(torch.nn.Module(), graph)


def _same_node(node: Node) -> Node:
    return node


def _meta_from_data(
    about: dict[str, Any], memory: FakeMemory, origins: Origins, targets: dict[str, Any]
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, held in about.items():
        if key == "val":
            found[key] = _value_from_data(held, memory)
        elif key == "stack_trace":
            found[key] = origins.traces[held]
        elif key == "nn_module_stack":
            found[key] = dict(origins.stacks[held])
        elif key == "tensor_meta":
            value, (trained, form) = found["val"], held
            form = constant_from_data(form, [])
            found[key] = TensorMetadata(
                value.shape, value.dtype, trained, value.stride(), form, False, {}
            )
        elif key == "original_aten":
            if held not in targets:
                targets[held] = target_from_data(held)
            found[key] = targets[held]
        elif key == "recompute":
            found[key] = CheckpointPolicy[held]
        else:
            found[key] = held
    return found


def _value_from_data(held: Any, memory: FakeMemory) -> Any:
    if not isinstance(held, dict):
        return held
    ((kind, parts),) = held.items()
    if kind == "tensor":
        storage, nbytes, dtype, device, shape, strides, offset = parts
        place = torch.device(device)
        value: FakeTensor = memory.tensor(
            storage, nbytes, getattr(torch, dtype), place, shape, strides, offset
        )
        return value
    values = [_value_from_data(v, memory) for v in parts]
    return values if kind == "list" else tuple(values)
