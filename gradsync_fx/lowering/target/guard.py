"""The device guard of guard.cpp: built once for each torch, kept beside Inductor's cache, and loaded at any time.

Nothing takes it out again: it is loaded in a process that ends with what was asked of it.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path

import torch
from filelock import FileLock

from gradsync_fx._torch import inductor_cache_dir
from gradsync_fx.errors import ToolchainError


SOURCE = Path(__file__).with_name("guard.cpp")


def load_guard() -> None:
    """Makes fake CUDA tensors traceable in this process. Raises `ToolchainError` where the guard cannot be built."""
    ctypes.CDLL(str(_built("-lc10", "-ltorch_cpu")))


def _built(*libraries: str) -> Path:
    """The library. One process builds it, which takes seconds; others that need it meanwhile wait."""
    installed = Path(torch.__file__).parent
    text = f"{torch.__version__} {installed} {SOURCE.read_text()}"
    folder = Path(inductor_cache_dir(), "gradsync_fx")
    library = folder / f"guard-{hashlib.sha256(text.encode()).hexdigest()[:16]}.so"
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            _build(library, installed, libraries)
    return library


def _build(library: Path, installed: Path, libraries: tuple[str, ...]) -> None:
    unfinished = library.with_suffix(f".{os.getpid()}")
    headers = installed / "include"
    command = ["g++", "-shared", "-fPIC", "-O1", "-std=c++20", str(SOURCE), "-o", str(unfinished)]
    places = [f"-I{headers}", f"-I{headers}/torch/csrc/api/include", f"-L{installed}/lib"]
    done = subprocess.run([*command, *places, *libraries], capture_output=True, text=True)
    if done.returncode:
        raise ToolchainError(
            "g++",
            seen=f"it cannot build the device guard: {done.stderr.strip()[-500:]}",
            wanted="a g++ that knows C++20, as torch's own headers want it",
            fix="install a newer one: apt-get install g++",
        )
    unfinished.replace(library)
