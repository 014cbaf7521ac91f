"""A CUDA device that is not there, as far as torch, Inductor and Triton ask for one: it answers, and loads nothing.

    with absent(card) as compiled: ...    # Inductor makes Triton code, and Triton PTX and cubin
    compiled                              # what Triton made, in order

Nothing can run on it. What is replaced is put back at the end, but torch keeps more than can be seen (tables of
patterns for a device, say): whoever goes on to compile for a real one does this in a process of its own (apart.py).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from gradsync_fx import _torch_cuda as parts
from gradsync_fx._torch import TorchDispatchMode
from gradsync_fx.lowering.target.cards import Card
from gradsync_fx.lowering.target.guard import load_guard


@dataclasses.dataclass(frozen=True, slots=True)
class Binary:
    """One kernel as Triton made it, for one choice of its block sizes."""

    kernel: str
    ptx: str
    cubin: bytes


@contextmanager
def absent(card: Card, *, every_choice: bool = False) -> Iterator[list[Binary]]:
    """Everything below compiles for `card`; what Triton makes is listed.

    every_choice: with all block sizes that Inductor would try on the device, not only the first.
    """
    torch.ones((), requires_grad=True).backward()  # autograd starts its threads: the guard adds one
    load_guard()
    properties = _properties(card)
    compiled: list[Binary] = []
    with ExitStack() as stack:
        _answer_for_cuda(stack, properties)
        _drive_triton(stack, properties)
        _settle_inductor(stack, card)
        _list_what_triton_makes(stack, compiled)
        if not every_choice:
            _first_choice(stack)
        for kept in parts.kept_answers():
            kept.cache_clear()
            stack.callback(kept.cache_clear)
        yield compiled


def _properties(card: Card) -> SimpleNamespace:
    """What `torch.cuda.get_device_properties` gives."""
    major, minor = card.capability
    return SimpleNamespace(
        name=card.name,
        major=major,
        minor=minor,
        multi_processor_count=card.processors,
        shared_memory_per_block_optin=card.shared_memory,
        shared_memory_per_multiprocessor=card.shared_memory + 1024,
        shared_memory_per_block=49152,
        L2_cache_size=card.cache,
        total_memory=card.memory,
        regs_per_multiprocessor=65536,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        is_integrated=0,
        is_multi_gpu_board=0,
        gcnArchName="",
        uuid="",
        clock_rate=1980000,
        memory_clock_rate=2619000,
        memory_bus_width=5120,
    )


class _Nothing:
    """A stream, an event, a device guard: whatever it is asked for, it does nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *args: Any) -> None: ...


def _answer_for_cuda(stack: ExitStack, card: SimpleNamespace) -> None:
    """`torch.cuda` and Dynamo's interface to it."""
    capability = (card.major, card.minor)
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "device": _Nothing,
        "_DeviceGuard": _Nothing,
        "synchronize": lambda device=None: None,
        "current_stream": lambda device=None: _Nothing(),
        "get_device_properties": lambda device=None: card,
        "get_device_capability": lambda device=None: capability,
        "get_device_name": lambda device=None: card.name,
        "memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (card.total_memory, card.total_memory),
        "empty_cache": lambda: None,
        "is_bf16_supported": lambda *args, **kwargs: True,
        "is_tf32_supported": lambda: True,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device=None: None,
    }
    interface = parts.device_interface.CudaInterface
    for name, answer in answers.items():
        _put(stack, torch.cuda, name, answer)
        if name in vars(interface):
            _put(stack, interface, name, answer if name == "device" else staticmethod(answer))
    for name in ("exchange_device", "maybe_exchange_device", "get_raw_stream"):
        _put(stack, interface, name, staticmethod(lambda index: 0))
    major_minor = card.major * 10 + card.minor
    _put(stack, interface, "get_compute_capability", staticmethod(lambda device=None: major_minor))
    known = parts.device_interface.caching_worker_device_properties
    stack.enter_context(mock.patch.dict(known, {"cuda": [card]}))
    current = parts.device_interface.caching_worker_current_devices
    stack.enter_context(mock.patch.dict(current, {"cuda": 0}))
    _put(stack, torch.version, "cuda", torch.version.cuda or "13.0")
    _put(stack, parts.cuda_graphs, "is_current_stream_capturing", lambda: False)
    _put(stack, parts.cuda_graphs, "_cuda_isCurrentStreamCapturing", lambda: False)
    for name, value in (
        ("_cuda_getCurrentRawStream", 0),
        ("_cuda_isCurrentStreamCapturing", False),
        ("_cuda_cudaCachingAllocator_is_enabled", True),
    ):
        _put(stack, parts.torch_c, name, lambda *args, value=value: value)
    # Fake tensors would otherwise start the device that they name.
    _put(stack, parts.fake_tensor.FakeTensorMode, "avoid_device_init", property(lambda mode: True))
    _put(stack, parts.fake_tensor, "init_gpu_context", lambda device: None)


def _drive_triton(stack: ExitStack, card: SimpleNamespace) -> None:
    """A driver that knows the card, and takes every binary for loaded."""

    class Utils:
        def get_device_properties(self, index: int) -> dict[str, int]:
            return {
                "max_shared_mem": card.shared_memory_per_block_optin,
                "multiprocessor_count": card.multi_processor_count,
                "warpSize": card.warp_size,
                "max_num_regs": card.regs_per_multiprocessor,
                "sm_clock_rate": card.clock_rate,
                "mem_clock_rate": card.memory_clock_rate,
                "mem_bus_width": card.memory_bus_width,
            }

        def load_binary(self, *args: Any) -> tuple[int, int, int, int, int]:
            return 1, 1, 32, 0, 1024  # module, function, registers, spills, threads

    class Driver(parts.nvidia_driver.CudaDriver):
        def __init__(self) -> None:
            self.utils = Utils()
            self.launcher_cls = lambda source, metadata: lambda *args, **kwargs: None
            self.get_current_device = lambda: 0
            self.set_current_device = lambda index: None
            self.get_current_stream = lambda index: 0
            self.get_device_capability = lambda *args: (card.major, card.minor)

        @staticmethod
        def is_active() -> bool:
            return True

    _put(stack, parts.nvidia_driver, "CudaDriver", Driver)
    backends = parts.triton.backends.backends
    ours = dataclasses.replace(backends["nvidia"], driver=Driver)
    stack.enter_context(mock.patch.dict(backends, {"nvidia": ours}))
    stack.callback(parts.triton_driver.set_active, parts.active_triton_driver())
    parts.triton_driver.set_active(Driver())
    _put(stack, parts.triton_helpers, "set_driver_to_gpu", lambda: None)


def _settle_inductor(stack: ExitStack, card: Card) -> None:
    """What Inductor would measure or compute on the device."""
    _put(stack, parts.inductor_utils, "get_gpu_dram_gbps", lambda: card.bandwidth / 1e9)
    settings = {
        "compile_threads": 1,  # the workers of a pool know nothing of this device
        "use_static_triton_launcher": False,
        "shape_padding": False,  # it is decided by measuring
        "fx_graph_cache": False,  # what is found there was compiled before
    }
    stack.enter_context(parts.inductor_config.patch(settings))
    for folder in (
        parts.joint_graph.UniformValueConstantFolder,
        parts.constant_folding.ConstantFolder,
    ):
        if "_deduce_value" in vars(folder):
            _put(stack, folder, "_deduce_value", _on_cpu(vars(folder)["_deduce_value"]))


class _OnCpu(TorchDispatchMode):
    """Constants are computed on the CPU; the node that they replace keeps its own device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def moved(value: Any) -> Any:
            is_device = isinstance(value, torch.device) and value.type == "cuda"
            return torch.device("cpu") if is_device else value

        named = {name: moved(value) for name, value in (kwargs or {}).items()}
        return func(*map(moved, args), **named)


def _on_cpu(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        with _OnCpu():
            return method(*args, **kwargs)

    return run


def _list_what_triton_makes(stack: ExitStack, compiled: list[Binary]) -> None:
    inner = parts.triton.compile

    def listed(src: Any, target: Any = None, options: Any = None, **kwargs: Any) -> Any:
        made = inner(src, target=target, options=options, **kwargs)
        compiled.append(Binary(src.fn.__name__, made.asm["ptx"], made.asm["cubin"]))
        return made

    _put(stack, parts.triton, "compile", listed)
    _put(stack, vars(parts.triton_heuristics)["triton"], "compile", listed)


def _first_choice(stack: ExitStack) -> None:
    inner = parts.triton_heuristics.cached_autotune

    def first(size_hints: Any, configs: list[Any], *args: Any, **kwargs: Any) -> Any:
        return inner(size_hints, configs[:1], *args, **kwargs)

    _put(stack, parts.triton_heuristics, "cached_autotune", first)


def _put(stack: ExitStack, owner: Any, name: str, value: Any) -> None:
    stack.enter_context(mock.patch.object(owner, name, value, create=True))
