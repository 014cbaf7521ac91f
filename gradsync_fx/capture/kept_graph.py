"""What AOTAutograd makes of Dynamo's graph is kept on disk: a later process that traces the same step reads it there.

    Dynamo's graph, its inputs, all settings -> key -> entry -> ATen graph, called with the same inputs
    no entry                                 -> AOTAutograd -> ATen graph -> entry

Only the graph is kept. Inputs, leaves, lines, modules and optimizers are those that this process's Dynamo saw. What the
key cannot name is not kept (`UnwritableGraph`): symbolic shapes, subclasses of tensors, inputs that share memory, ops
of other libraries, whose meaning may change behind their names, work that AOTAutograd does round the graph. What is
kept is also used where it was made: a graph that was read is that of the process that wrote it, name by name.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import sys
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.fx import GraphModule, Node

from gradsync_fx._torch import OpOverload
from gradsync_fx._torch_aot import (
    HigherOrderOperator,
    OpOverloadPacket,
    compiler_settings,
    dispatch_modes_in_force,
    memory_key,
    torch_functions_in_force,
    work_round_the_graph,
)
from gradsync_fx.disk_cache import ignore_entry, keeps_entries, key_of, read_entry, write_entry
from gradsync_fx.ir.graph_data import (
    NAMESPACES,
    Origins,
    UnwritableGraph,
    constant_as_data,
    graph_as_data,
    graph_from_data,
    target_as_data,
)
from gradsync_fx.version import VERSION


log = logging.getLogger(__name__)

# Graphs within Dynamo's graph that are traced into it, and nothing else.
_INNER = (
    torch.ops.higher_order.tag_activation_checkpoint,
    torch.ops.higher_order.autograd_function_apply,
)
_FORMS = (torch.Tensor, nn.Parameter, nn.Buffer)
_MODULES = ("torch", "_operator", "builtins", "math")
# What Dynamo says of a node that does not change what becomes of it, or is in the key by other ways.
_SAID = {
    "stack_trace", "example_value", "source_fn_stack", "nn_module_stack", "tensor_dict", "grapharg", "seq_nr",
    "autograd_backward", "creation_timestamp",
}  # fmt: skip
_ABOUT_MODULES = {"dynamo_flat_name_to_original_fqn", "dynamo_compile_id", "backend_id"}


class KeptGraph:
    """The entry for one of Dynamo's graphs. key: "" where it cannot be kept."""

    def __init__(self, module: GraphModule, inputs: list[Any], decompositions: Any) -> None:
        self.key, self._origins = "", Origins(_all_nodes(module))
        if not keeps_entries():
            return
        try:
            forms = [_form(value) for value in inputs]
            self.key = key_of(
                VERSION,
                own_sources(),
                *_surroundings(inputs),
                _table(decompositions),
                forms,
                _memory(inputs),
                _graph(module),
                self._origins.pattern,
            )
        except UnwritableGraph as reason:
            log.debug("what AOTAutograd makes of the step is not kept on disk: %s", reason)

    def read(self, fake_mode: Any) -> GraphModule | None:
        """The graph, its values in this mode; None where there is none."""
        data = read_entry(self.key) if self.key else None
        if data is None:
            return None
        try:
            return graph_from_data(data, fake_mode, self._origins)
        except (LookupError, AttributeError, TypeError, ValueError, RuntimeError) as failure:
            ignore_entry(self.key, failure)
            return None

    def write(self, graph: GraphModule, fake_mode: Any) -> GraphModule:
        """Keeps what AOTAutograd has just made, and returns it as `read` would; as it is, where it cannot be kept."""
        if not self.key:
            return graph
        try:
            reason = work_round_the_graph(len(graph.graph.find_nodes(op="placeholder")))
            if reason:
                raise UnwritableGraph(reason)
            data = graph_as_data(graph, self._origins)
        except UnwritableGraph as reason:
            log.debug("what AOTAutograd made of the step is not kept on disk: %s", reason)
            return graph
        write_entry(self.key, data)
        return graph_from_data(data, fake_mode, self._origins)


def _all_nodes(module: GraphModule) -> Iterator[Node]:
    for inner in module.modules():
        if isinstance(inner, GraphModule):
            yield from inner.graph.nodes


def _form(value: Any) -> Any:
    if type(value) not in _FORMS or value.layout is not torch.strided:
        raise UnwritableGraph(f"an input of type {type(value).__name__}")
    return (
        type(value).__name__,
        value.dtype,
        value.device,
        tuple(value.shape),
        value.stride(),
        value.storage_offset(),
        value.untyped_storage().nbytes(),
        value.requires_grad,
        value.is_leaf,
        (value.is_conj(), value.is_neg(), value.is_inference(), value._is_view()),
    )


def _memory(inputs: list[Any]) -> int:
    keys = {memory_key(value) for value in inputs}
    if len(keys) < len(inputs):
        raise UnwritableGraph("inputs that share memory")
    return len(keys)


def _graph(module: GraphModule) -> list[Any]:
    """Dynamo's graph as data, but for the names of nodes and the lines that they come from."""
    if not module.meta.keys() <= _ABOUT_MODULES:
        raise UnwritableGraph(f"a graph with {sorted(module.meta.keys() - _ABOUT_MODULES)}")
    if any(True for _ in module.parameters()) or any(True for _ in module.buffers()):
        raise UnwritableGraph("tensors of the graph's own")
    at: dict[Node, int] = {}
    found: list[Any] = []
    for node in module.graph.nodes:
        if not node.meta.keys() <= _SAID:
            raise UnwritableGraph(f"a node with {sorted(node.meta.keys() - _SAID)}")
        if node.op == "placeholder":
            _refuse_symbols(node)
        target = "" if node.op == "placeholder" else _target(module, node)
        given = constant_as_data((node.args, node.kwargs), at.__getitem__)
        found.append((node.op, target, given, bool(node.meta.get("autograd_backward"))))
        at[node] = len(at)
    return found


def _refuse_symbols(node: Node) -> None:
    value = node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or any(type(n) is not int for n in value.shape):
        raise UnwritableGraph("an input of symbolic shape, or a number")


def _target(module: GraphModule, node: Node) -> Any:
    target: Any = node.target
    if node.op == "get_attr":
        inner = getattr(module, target, None)
        if not isinstance(inner, GraphModule):
            raise UnwritableGraph(f"a constant {target}")
        return _graph(inner)
    if node.op in ("call_method", "output"):
        return target
    if node.op != "call_function":
        raise UnwritableGraph(f"a node of the kind {node.op}")
    if isinstance(target, OpOverload):
        return target_as_data(target)
    if isinstance(target, OpOverloadPacket):
        return [target_as_data(getattr(target, name)) for name in target.overloads()]
    if isinstance(target, HigherOrderOperator) and target in _INNER:
        return str(target)
    name, home = getattr(target, "__name__", ""), getattr(target, "__module__", None) or ""
    if isinstance(target, BuiltinFunctionType):
        name = target.__qualname__
    elif getattr(sys.modules.get(home), name, None) is not target:
        home = ""  # it may be another function that only says so
    if isinstance(target, HigherOrderOperator) or home.partition(".")[0] not in _MODULES:
        raise UnwritableGraph(f"a call of {target}")
    return f"{home}.{name}"


def _table(decompositions: Any) -> list[str]:
    """The decompositions of the ops that a graph here may hold, by name."""
    found = []
    for op, function in (decompositions or {}).items():
        if getattr(op, "namespace", "") not in NAMESPACES:
            continue
        held = ""
        if isinstance(function, partial):
            held, function = str(function.keywords), function.func
        home = getattr(function, "__module__", "") or ""
        if home.partition(".")[0] != "torch":
            raise UnwritableGraph(f"a decomposition of {op} that is not torch's")
        found.append(f"{op} {home}.{getattr(function, '__qualname__', '')} {held}")
    return sorted(found)


def _surroundings(inputs: list[Any]) -> Iterator[Any]:
    """All that AOTAutograd may look at beside the graph."""
    if torch_functions_in_force() or dispatch_modes_in_force():
        raise UnwritableGraph("a mode that changes what ops do")
    kinds = ("cpu", *sorted({value.device.type for value in inputs} - {"cpu"}))
    if any(torch.is_autocast_enabled(kind) for kind in kinds):
        raise UnwritableGraph("an autocast round the step")
    yield torch.__version__, torch.version.git_version, sys.version, platform.machine()
    yield torch.backends.cpu.get_cpu_capability()
    yield from sorted({_card(value.device) for value in inputs})
    yield compiler_settings()
    yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    yield torch.get_default_dtype(), torch.get_default_device()
    yield torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    cuda = torch.backends.cuda
    yield cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    yield cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled, torch.backends.mkldnn.enabled
    yield torch.backends.mha.get_fastpath_enabled()
    yield torch.backends.opt_einsum.enabled, torch.backends.opt_einsum.strategy
    yield dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def _card(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    about = torch.cuda.get_device_properties(device)
    return f"{about.name} {about.major}.{about.minor}"


@cache
def own_sources() -> str:
    """A digest of this package as it is: one that is being worked on changes without its version."""
    folder = Path(__file__).parent.parent
    files = sorted(folder.rglob("*.py"))
    digests = [hashlib.sha256(file.read_bytes()).hexdigest() for file in files]
    return key_of(*(file.relative_to(folder) for file in files), *digests)
