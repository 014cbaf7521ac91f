"""The one place that names private or version-dependent parts of torch.

Seen in torch 2.11.0, 2.13.0 and 2.15.0. A name that is gone raises `VersionError` on import of the package, with
torch's version and the range that was tested.
"""

from __future__ import annotations

import torch

from gradsync_fx.errors import VersionError


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
            seen=f"version {found[0]}.{found[1]} is installed",
            wanted=f"a tested version ({_range_text()})",
            fix="install a tested torch, or a release of gradsync_fx that knows this one",
        )


check_version()

try:
    from torch import _dynamo as dynamo
    from torch._dynamo import config as dynamo_config
    from torch._dynamo import optimize as dynamo_optimize
    from torch._dynamo.backends.registry import _BACKENDS as dynamo_backends
    from torch._dynamo.backends.registry import _COMPILER_FNS as dynamo_compilers
    from torch._dynamo.backends.registry import lookup_backend
    from torch._dynamo.convert_frame import compile_lock
    from torch._dynamo.exc import TorchDynamoException, Unsupported
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import ConstantSource
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.utils import counters as dynamo_counters
    from torch._dynamo.variables import builder as dynamo_builder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.ctx_manager import GradModeVariable, NullContextVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.misc import (
        DebuggingVariable,
        LoggingLoggerVariable,
        StringFormatVariable,
    )
    from torch._dynamo.variables.optimizer import OptimizerVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable
    from torch._functorch import config as functorch_config
    from torch._functorch._aot_autograd import graph_compile as aot_graphs
    from torch._functorch.aot_autograd import aot_module_simplified
    from torch._guards import TracingContext, detect_fake_mode, tracing
    from torch._inductor import config as inductor_config
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import (
        _recursive_joint_graph_passes as inductor_joint_passes,
    )
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.decomposition import select_decomp_table
    from torch._inductor.pattern_matcher import stable_topological_sort
    from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir
    from torch._inductor.virtualized import V as inductor_globals
    from torch._logging._internal import trace_structured
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.distributed.distributed_c10d import _get_default_store as default_store
    from torch.fx._lazy_graph_module import _make_graph_module as make_graph_module
    from torch.fx._lazy_graph_module import _use_lazy_graph_module as lazy_graph_modules
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import (
        DimDynamic,
        ShapeEnv,
        StatelessSymbolicContext,
        compute_unbacked_bindings,
    )
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from torch.utils._pytree import tree_leaves, tree_map_only
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis as PlainArithmetic
except ImportError as missing:
    raise VersionError(
        f"torch {torch.__version__}",
        seen=f"a private name is missing ({missing})",
        wanted=f"a tested version ({_range_text()})",
        fix="install a tested torch, or a release of gradsync_fx that knows this one",
    ) from missing

FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"

# DDP's Python reducer switches this on for the whole process: a pass for its own graphs, which fails on others.
NOT_FOR_OUR_PROGRAMS = {"_fuse_ddp_communication": False}

# Renamed in 2.13; the old name warns there.
all_gather_single = (
    getattr(torch.distributed, "all_gather_single", None)
    or torch.distributed.all_gather_into_tensor
)

__all__ = [
    "aot_graphs",
    "dynamo_builder",
    "compile_fx",
    "dynamo",
    "dynamo_backends",
    "dynamo_compilers",
    "StringFormatVariable",
    "LazyVariableTracker",
    "Unsupported",
    "LoggingLoggerVariable",
    "InstructionTranslatorBase",
    "DebuggingVariable",
    "ConstDictVariable",
    "BatchNorm",
    "all_gather_single",
    "ConstantSource",
    "ConstantVariable",
    "DimDynamic",
    "FAKE_TENSOR_LOG",
    "FakeStore",
    "FakeTensor",
    "FakeTensorMode",
    "GradModeVariable",
    "GuardBuilder",
    "NOT_FOR_OUR_PROGRAMS",
    "NullContextVariable",
    "OptimizerVariable",
    "PlainArithmetic",
    "ShapeEnv",
    "StatelessSymbolicContext",
    "TensorVariable",
    "TorchDynamoException",
    "TracingContext",
    "TupleVariable",
    "UserDefinedObjectVariable",
    "VariableTracker",
    "aot_module_simplified",
    "check_version",
    "compile_fx_inner",
    "compile_lock",
    "compute_unbacked_bindings",
    "default_store",
    "detect_fake_mode",
    "dynamo_config",
    "dynamo_counters",
    "dynamo_optimize",
    "functorch_config",
    "get_cpp_compiler",
    "inductor_cache_dir",
    "inductor_config",
    "inductor_globals",
    "inductor_joint_passes",
    "install_guard",
    "lazy_graph_modules",
    "list_mode_options",
    "lookup_backend",
    "make_fx",
    "make_graph_module",
    "select_decomp_table",
    "stable_topological_sort",
    "sympy_interp",
    "trace_structured",
    "tracing",
    "tree_leaves",
    "tree_map_only",
]
