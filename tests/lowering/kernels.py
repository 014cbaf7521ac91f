"""C++ kernels for tests of how they are compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from gradsync_fx._torch import fresh_cache, inductor_cache_dir
from gradsync_fx.lowering import kernel_libraries
from gradsync_fx.lowering.kernel_libraries import Source


ADD = """
#include <torch/csrc/inductor/cpp_prefix.h>
extern "C" void kernel(const float* in, float* out)
{
    for (int64_t i = 0; i < 4; i++) out[i] = in[i] + %s;
}
"""
TYPES = ["const float*", "float*"]


def adding(number: str) -> Source:
    return Source(tuple(TYPES), ADD % number)


@contextmanager
def knowing_none(folder: Path) -> Iterator[Path]:
    """A cache folder of its own, and a process that knows no kernel."""
    with (
        fresh_cache(dir=str(folder)),
        mock.patch.object(kernel_libraries, "_LOADED", {}),
        mock.patch.object(kernel_libraries, "_STARTED", {}),
    ):
        yield Path(inductor_cache_dir())


def result(kernel: Any) -> list[float]:
    out = torch.empty(4)
    kernel(torch.arange(4.0), out)
    return out.tolist()


def libraries(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.main.so"))
