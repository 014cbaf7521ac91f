"""The private parts of torch, Inductor and Triton that know CUDA devices: what a device that is not there answers for.

Beside _torch.py, as Triton may be missing: imported only where code for a target is made. Seen in torch 2.13.0 and
Triton 3.7.1; a name that is gone raises `VersionError`.
"""

from __future__ import annotations

from typing import Any

from gradsync_fx._torch import check_names, missing_name


try:
    import triton
    import triton.backends
    from torch import _C as torch_c
    from torch._dynamo import device_interface
    from torch._inductor import config as inductor_config
    from torch._inductor import constant_folding
    from torch._inductor import debug as inductor_debug
    from torch._inductor import utils as inductor_utils
    from torch._inductor.async_compile import CompiledTritonKernels
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.cudagraph_utils import check_lowering_disable_cudagraph
    from torch._inductor.fx_passes import joint_graph
    from torch._inductor.output_code import CompiledFxGraph
    from torch._inductor.runtime import hints, triton_helpers, triton_heuristics
    from torch._inductor.utils import get_first_incompatible_cudagraph_node
    from torch._subclasses import fake_tensor
    from torch.cuda import graphs as cuda_graphs
    from torch.utils import _triton as triton_utils
    from triton.backends.nvidia import driver as nvidia_driver
    from triton.backends.nvidia.compiler import get_ptxas
    from triton.runtime import driver as triton_driver
except ImportError as missing:
    raise missing_name(str(missing)) from missing

check_names(
    (
        (inductor_utils, "get_gpu_dram_gbps"),
        (inductor_debug, "_inductor_triton_kernel_to_post_grad_node_info"),
        (triton_heuristics, "cached_autotune"),
        (triton_helpers, "set_driver_to_gpu"),
        (triton_utils, "has_triton"),
        (fake_tensor, "init_gpu_context"),
        (fake_tensor.FakeTensorMode, "avoid_device_init"),
        (device_interface, "caching_worker_device_properties"),
        (device_interface, "caching_worker_current_devices"),
        (nvidia_driver, "CudaDriver"),
        (cuda_graphs, "is_current_stream_capturing"),
        (joint_graph.UniformValueConstantFolder, "_deduce_value"),
        (CompiledFxGraph, "__init__"),
    )
)


def nodes_of_kernels() -> dict[str, list[str]]:
    """Kernels of the wrappers made so far, "kernel:number", in the order of their calls, with the nodes of each."""
    found: dict[str, list[str]] = vars(inductor_debug)[
        "_inductor_triton_kernel_to_post_grad_node_info"
    ]
    return found


def active_triton_driver() -> Any:
    """The driver that Triton uses; None before the first use."""
    return getattr(triton_driver, "_active", None)


def kept_answers() -> tuple[Any, ...]:
    """What torch keeps for good: answers about devices, and kernels that it holds already. Each has `cache_clear`."""
    create: Any = hints.DeviceProperties.create
    return (triton_utils.has_triton, create.__func__, PyCodeCache, CompiledTritonKernels)
