"""The private parts of Inductor that compile C++ kernels and load them.

Beside _torch.py, as that file is long. Seen in torch 2.13.0; a name that is gone raises `VersionError`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from torch import _C as torch_c

from gradsync_fx._torch import check_names, missing_name


try:
    from torch._inductor.async_compile import AsyncCompile, get_compile_threads, kernel_code_log
    from torch._inductor.codecache import (
        CppPythonBindingsCodeCache,
        LambdaFuture,
        torch_key,
        triton_key,
        write_atomic,
    )
    from torch._inductor.cpp_builder import CppBuilder, CppTorchDeviceOptions
    from torch._inductor.cpu_vec_isa import pick_vec_isa
    from torch._inductor.exc import CppCompileError
    from torch._inductor.utils import clear_on_fresh_cache
except ImportError as missing:
    raise missing_name(str(missing)) from missing

# Where the function is that finds a tensor's memory; kernels ask the environment for it.
_POINTER = "_torchinductor_pyobject_tensor_data_ptr"
# Stands in the sources that VecISA.check_build compiles.
_PROBE = "_chk_kernel"

check_names(
    (
        (AsyncCompile, "cpp_pybinding"),
        (AsyncCompile, "submit"),
        (AsyncCompile, "wait"),
        (CppPythonBindingsCodeCache, "load_async"),
        (CppPythonBindingsCodeCache, "suffix_template"),
        (torch_c._dynamo.guards, _POINTER),
        (torch_key, "prefetch"),
        (triton_key, "prefetch"),
    )
)

CppKernel = Callable[..., Any]


def in_place_of_cpp_kernels(
    function: Callable[[Any, list[str], str], Any],
) -> AbstractContextManager[Any]:
    """Has generated code call `function(async_compile, types of the arguments, source)` for a kernel in C++."""
    return mock.patch.object(AsyncCompile, "cpp_pybinding", function)


# What Inductor itself does for a kernel: one file, one library. Takes what `function` above does.
plain_cpp_kernel: Any = vars(AsyncCompile)["cpp_pybinding"]


# It replaces the futures among a program's names by what they give.
plain_wait: Any = vars(AsyncCompile)["wait"]


def in_place_of_waits(
    function: Callable[[Any, dict[str, Any]], None],
) -> AbstractContextManager[Any]:
    """Has generated code call `function(async_compile, its names)` once all of its kernels are named."""
    return mock.patch.object(AsyncCompile, "wait", function)


def kernel_is_logged(source: str) -> None:
    """Shows the source of a kernel where `TORCH_LOGS=kernel_code` asks for it."""
    kernel_code_log.info("CPP+Bindings Kernel:\n%s", source)


def binding_of(name: str, types: list[str]) -> str:
    """Source that makes a C function a module of Python's, of the same name."""
    cache = CppPythonBindingsCodeCache
    arguments = ", ".join(
        f"parse_arg<{kind.replace('const ', '')}>(args, {i})" for i, kind in enumerate(types)
    )
    return cache.suffix_template.format(
        arg_len=len(types),
        call_entry_func=cache.call_entry_function.replace("kernel", name).format(arguments),
        entry_func=name,
        extra_parse_arg=cache.extra_parse_arg,
    )


def prefetch_keys() -> None:
    """Begins to find out what is part of each of Inductor's keys, in a thread of torch's."""
    prefetched: tuple[Any, ...] = (torch_key, triton_key)
    for key in prefetched:
        key.prefetch()


def compile_command() -> str:
    """The command that compiles a file of kernels, but for the names of files."""
    options = CppTorchDeviceOptions(
        vec_isa=pick_vec_isa(),
        device_type="cpu",
        **CppPythonBindingsCodeCache.cpp_compile_command_flags,
    )
    return CppBuilder(name="o", sources="i", BuildOption=options).get_command_line()


def probes_of_instructions(folder: str) -> dict[str, Path]:
    """Libraries of this cache folder by which Inductor finds out which vector instructions there are, by their place.

    Without them a process compiles them before anything else.
    """
    found = {}
    for source in Path(folder).glob("??/*.cpp"):
        library = source.with_suffix(".so")
        if library.is_file() and _PROBE in source.read_text(errors="replace"):
            found[library.relative_to(folder).as_posix()] = library
    return found


@clear_on_fresh_cache
class _Library(CppPythonBindingsCodeCache):
    """Libraries of several kernels: compiled as those of one, and left to `loaded_kernel`."""

    cache: dict[str, Any] = {}
    cache_clear = staticmethod(cache.clear)

    @classmethod
    def _load_library_inner(cls, path: str, key: str) -> Any:
        return SimpleNamespace(path=path)


def started_library(source: str) -> Callable[[], Path]:
    """Begins to compile a file of kernels, unless it is there; what is returned waits, and gives the library's path.

    With one thread it is compiled when it is waited for: Inductor holds a lock while it submits, which the work takes.
    """
    submit = AsyncCompile.submit if get_compile_threads() > 1 else None
    load = _Library.load_async(source, submit_fn=submit)
    return lambda: Path(load().path)


def loaded_kernel(library: Path, name: str) -> CppKernel:
    """A kernel of a library. Raises `ImportError` or `OSError` where the library is damaged, or has no such kernel."""
    pointer = getattr(torch_c._dynamo.guards, _POINTER)
    os.environ[_POINTER.upper()] = str(pointer)
    spec = importlib.util.spec_from_file_location(f"{library.stem}.{name}", library)
    if spec is None or spec.loader is None:
        raise ImportError(f"{library} is no library")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    kernel: CppKernel = getattr(module, name)
    return kernel
