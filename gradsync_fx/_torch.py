"""The one module that names private or version-dependent parts of torch; those for C++ and CUDA: _torch_c*.py.

Seen in torch 2.11.0, 2.13.0, 2.14.1 and 2.15.0; docs/versions.md has what passed there (`make test-torch`). A name
that is gone raises `VersionError` at the first use of the package, with torch's version, ours, and the tested range.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from inspect import signature
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx.errors import VersionError
from gradsync_fx.version import VERSION


OLDEST, NEWEST = (2, 11), (2, 15)


def torch_version() -> tuple[int, int]:
    """Major and minor of the installed torch."""
    major, minor = torch.__version__.split("+")[0].split(".")[:2]
    return int(major), int(minor)


def _range_text() -> str:
    return f"torch {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"


def check_version(version: tuple[int, int] | None = None) -> None:
    """Raises `VersionError` when torch is outside the tested range."""
    found = version or torch_version()
    if not OLDEST <= found <= NEWEST:
        raise VersionError(
            "torch",
            seen=f"version {found[0]}.{found[1]} is installed beside gradsync_fx {VERSION}",
            wanted=f"a tested version ({_range_text()})",
            fix="install a tested torch, or a release of gradsync_fx that knows this one",
        )


def missing_name(what: str) -> VersionError:
    """The error for a private name that is gone."""
    return VersionError(
        f"torch {torch.__version__}",
        seen=f"a private name that gradsync_fx {VERSION} needs is missing ({what})",
        wanted=f"a tested version ({_range_text()})",
        fix="install a tested torch, or a release of gradsync_fx that knows this one",
    )


check_version()

try:
    from torch import _dynamo as dynamo
    from torch._C._distributed_c10d import _register_process_group
    from torch._C._dynamo.eval_frame import reset_code
    from torch._decomp import decompositions as torch_decompositions
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import exc as dynamo_exc
    from torch._dynamo import optimize as dynamo_optimize
    from torch._dynamo.backends.registry import _BACKENDS as dynamo_backends
    from torch._dynamo.backends.registry import _COMPILER_FNS as dynamo_compilers
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.eval_frame import cached_backends
    from torch._dynamo.exc import TorchDynamoException, TorchRuntimeError, Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.pgo import auto_dynamic
    from torch._dynamo.side_effects import SideEffects
    from torch._dynamo.source import ConstantSource, DictGetItemSource, GetItemSource, GlobalSource
    from torch._dynamo.symbolic_convert import (
        InstructionTranslator,
        InstructionTranslatorBase,
        TensorifyState,
        compare_op_handlers,
    )
    from torch._dynamo.utils import counters as dynamo_counters
    from torch._dynamo.variables import builder as dynamo_builder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.ctx_manager import GradModeVariable, NullContextVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.functions import (
        CollectiveFunctionRewriteVariable,
        LocalGeneratorObjectVariable,
    )
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.lists import ListVariable, TupleVariable
    from torch._dynamo.variables.misc import (
        DebuggingVariable,
        LoggingLoggerVariable,
        NumpyVariable,
        RandomClassVariable,
        RandomVariable,
        StringFormatVariable,
    )
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
    from torch._dynamo.variables.torch import BaseTorchVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd import graph_capture_wrappers as aot_wrappers
    from torch._functorch._aot_autograd import graph_compile as aot_graphs
    from torch._functorch._aot_autograd.schemas import MutationType, OutputType
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import comms as inductor_comms
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options
    from torch._inductor import utils as inductor_utils
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.compile_fx import (
        _recursive_joint_graph_passes as inductor_joint_passes,
    )
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.ir import FallbackKernel
    from torch._inductor.pattern_matcher import stable_topological_sort
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir
    from torch._inductor.utils import fresh_cache
    from torch._inductor.virtualized import V as inductor_globals
    from torch._logging._internal import trace_structured
    from torch._ops import OpOverload
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.autograd import _profiler_enabled as profiler_enabled  # type: ignore[attr-defined]
    from torch.distributed import _Work as Work  # type: ignore[attr-defined]
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.distributed.distributed_c10d import (  # type: ignore[attr-defined]
        _resolve_process_group as group_of_name,
    )
    from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
    from torch.fx._symbolic_trace import is_fx_symbolic_tracing
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        GuardOnDataDependentSymNode,
        ShapeEnv,
        StatelessSymbolicContext,
        compute_unbacked_bindings,
        free_unbacked_symbols,
    )
    from torch.fx.passes import _tensorify_python_scalars as tensorify_module
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils._sympy.functions import FloorDiv
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis as PlainArithmetic
    from torch.utils._sympy.symbol import SymT, symbol_is_type
except ImportError as missing:
    raise missing_name(str(missing)) from missing

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"

# DDP's Python reducer switches this on for the whole process: a pass for its own graphs, which fails on others.
NOT_FOR_OUR_PROGRAMS = {"_fuse_ddp_communication": False}

copy_each = torch._foreach_copy_  # of a list of tensors into another list's

# Renamed in 2.13; the old name warns there.
all_gather_single = (
    getattr(torch.distributed, "all_gather_single", None)
    or torch.distributed.all_gather_into_tensor
)

# How Dynamo's variables read an attribute: renamed in 2.14.
READ_ATTRIBUTE = (
    "tp_getattro_impl" if hasattr(VariableTracker, "tp_getattro_impl") else "var_getattr"
)

# Whether an f-string may hold a number that only the program knows: 2.11 asks for its value.
FORMATS_NUMBERS = torch_version() >= (2, 13)


def written_outside() -> list[tuple[int, bool]]:
    """Inputs that AOTAutograd writes itself, after the graph that it compiles, which returns their values first.

    Each with whether it becomes another tensor (`x.data = y`), not only another value. Seen in 2.13.
    """
    context = TracingContext.try_get()
    found = context.fw_metadata if context is not None else None
    if found is None:
        return []
    about = found.input_info
    return [
        (i, about[i].mutates_metadata or about[i].mutates_storage_metadata)
        for i in found.mutated_inp_runtime_indices
    ]


def inputs_given_back() -> dict[int, int]:
    """Outputs of the graph that AOTAutograd compiles which are inputs, written in the graph: the input of each.

    Counted after what `written_outside` names. Seen in 2.13.
    """
    context = TracingContext.try_get()
    found = context.fw_metadata if context is not None else None
    if found is None:
        return {}
    inside = MutationType.MUTATED_IN_GRAPH
    return {
        i: base
        for i, about in enumerate(found.output_info)
        if about.output_type == OutputType.is_input
        and (base := about.base_idx) is not None
        and found.input_info[base].mutation_type == inside
    }


# What is replaced or called while a step is traced, or runs eagerly.
NEEDED: tuple[tuple[Any, str], ...] = (
    (UserDefinedObjectVariable, READ_ATTRIBUTE),
    (TensorVariable, "method_backward"),
    (TensorVariable, "_collect_backward_inputs"),
    (InstructionTranslator, "current_tx"),
    (dynamo_exc, "FailOnRecompileLimitHit"),
    (dynamo_exc, "TensorifyScalarRestartAnalysis"),
    (tensorify_module, "guard_scalar"),
    (SideEffects, "store_attr"),
    (torch_decompositions, "select_one_layer_lstm_function"),
    (InstructionTranslatorBase, "call_function"),
    (InstructionTranslatorBase, "_load_attr"),
    (InstructionTranslatorBase, "_format_value"),
    (dynamo_builder, "process_automatic_dynamic"),
    (dynamo_builder, "is_int_specialization_case"),
    (aot_graphs, "_apply_tensorify_python_scalars"),
    (aot_wrappers, "OutputType"),
    (DebuggingVariable, "call_function"),
    (CollectiveFunctionRewriteVariable, "call_function"),
    (inductor_comms, "contains_collective"),
    (CppScheduling, "try_loop_split"),
    (LoggingLoggerVariable, "call_method"),
    (nn.utils.clip_grad, "_get_total_norm"),
    (nn.utils.clip_grad, "_clip_grads_with_norm_"),
)


def check_names(needed: Iterable[tuple[Any, str]] = NEEDED) -> None:
    """Raises `VersionError` when a class or module of torch lacks a name."""
    for owner, name in needed:
        if not hasattr(owner, name):
            raise missing_name(f"{owner.__name__}.{name}")


check_names()

format_value = InstructionTranslatorBase._format_value
load_attribute = InstructionTranslatorBase._load_attr
tensorify_numbers = aot_graphs._apply_tensorify_python_scalars
forget_constant_numbers, note_constant_number = TensorifyState.clear, TensorifyState.specialize
is_constant_number = TensorifyState.should_specialize
total_norm = nn.utils.clip_grad._get_total_norm


def in_order_with_collectives(*ops: Any) -> AbstractContextManager[Any]:
    """Has Inductor keep calls of these ops in the graph's order, among themselves and with torch's collectives."""
    plain: Any = vars(inductor_comms)["contains_collective"]

    def contains(node: Any, *args: Any) -> bool:
        kernel = getattr(node, "node", None)
        if isinstance(kernel, FallbackKernel) and kernel.op_overload in ops:
            return True
        return plain(node, *args)

    return mock.patch.object(inductor_comms, "contains_collective", contains)


def loops_split_evenly() -> AbstractContextManager[Any]:
    """Has Inductor split a loop by the divisor of an index only where nothing remains: it leaves the rest undone.

    Seen in 2.13 with a piece of a flattened matrix that ends within a row.
    """
    plain: Any = CppScheduling.try_loop_split

    def split(self: Any, nodes: Any) -> Any:
        for node in nodes:
            _, body, _ = node.node.get_default_sizes_body()
            for index in body.indexing_exprs.values():
                for divided in index.find(FloorDiv) if hasattr(index, "find") else ():
                    number, divisor = divided.args
                    if number in body.iter_vars and body.var_ranges[number] % divisor != 0:
                        return nodes
        return plain(self, nodes)

    return mock.patch.object(CppScheduling, "try_loop_split", split)


def is_recorded(node: Any) -> bool:
    """Whether a CUDA graph can hold what a node of a graph does."""
    unsafe = getattr(inductor_utils, "is_cudagraph_unsafe_fx_node", None)  # seen in 2.13
    if unsafe is not None:
        return not unsafe(node)
    return torch.Tag.cudagraph_unsafe not in getattr(node.target, "tags", ())


def as_dynamic(entry: Any) -> Any:
    """Dynamo's record of a number, marked as one that changes."""
    return replace(entry, scalar=auto_dynamic)


def read_attribute(variable: Any, tx: Any, name: str) -> Any:
    """An attribute of one of Dynamo's variables, as another one."""
    return getattr(variable, READ_ATTRIBUTE)(tx, name)


def leaves_among(loss: Any, variables: Iterable[Any]) -> list[Any]:
    """Those of Dynamo's variables that are leaves with a gradient, each once."""
    return loss._collect_backward_inputs(variables) or []


def formatted(tx: Any, text: str, positional: list[Any], named: dict[str, Any]) -> Any:
    """`text.format(*positional, **named)`, for Dynamo's code to do."""
    create: Any = StringFormatVariable.create
    tracer = (tx,) if "tx" in signature(create).parameters else ()  # since 2.15
    return create(*tracer, text, positional, named)


def in_place_of_backward(function: Callable[..., Any]) -> AbstractContextManager[Any]:
    """Has Dynamo call `function` at `loss.backward()`."""
    # Since 2.14 the methods of tensors stand in a table, which was made from the class.
    table = getattr(TensorVariable, "tp_methods", {})
    if "backward" not in table:
        return mock.patch.object(TensorVariable, "method_backward", function)
    return mock.patch.dict(table, {"backward": replace(table["backward"], handler=function)})


def users_of_memory(tensor: torch.Tensor) -> int:
    """How many tensors look at a tensor's memory, itself among them."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) - 1  # the storage at hand is one


def has_hooks(tensor: torch.Tensor) -> bool:
    """Whether something would run when this tensor's gradient is there."""
    return bool(tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None))


def step_hooks(optimizer: Optimizer) -> list[Any]:
    """Hooks before and after an optimizer's step: its own, and those of all optimizers."""
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    own = (
        getattr(optimizer, name, {}) for name in names
    )  # a wrapper may not have called `__init__`
    everywhere = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    return [hook for hooks in (*own, *everywhere) for hook in hooks.values()]


def counted_by_scheduler(step: Any) -> bool:
    """Whether an optimizer's `step` is a scheduler's wrapper, which counts its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


def communication_hooks(ddp: DistributedDataParallel) -> list[Any]:
    """The communication hooks of a DDP module, which replace its all-reduces."""
    return [hook for hook, _ in getattr(ddp, "_comm_hooks", [])]


def register_group(group: torch.distributed.ProcessGroup, name: Any) -> None:
    """From now on collectives find it by this name, as long as it is. Seen in 2.13."""
    group._set_group_name(name)
    _register_process_group(name, group)


def started_collectives(group: torch.distributed.ProcessGroup) -> int | None:
    """How many collectives a group has started so far; None where it does not count."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return None


def saved_factor(node: Any) -> Any:
    """The other operand that a node of autograd's graph multiplies or divides by; None where it saved none."""
    try:
        return node._saved_other
    except (AttributeError, RuntimeError):
        return None


def summed_sizes(node: Any) -> tuple[int, ...]:
    """The shape of what a node of autograd's graph sums up; () where it does not say."""
    return tuple(int(size) for size in getattr(node, "_saved_self_sym_sizes", ()))


def is_compiled(module: nn.Module) -> bool:
    """Whether `module.compile()` was called."""
    return getattr(module, "_compiled_call_impl", None) is not None
