"""The device guard that a CPU build of torch lacks: built once, kept in the user's cache folder, loaded before torch.

torch asks for the hooks of CUDA when it is first imported, so `load` comes before that, in a process of its own. What
is built here knows the torch beside it only: its version and the source are in the file's name.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path


SOURCE = Path(__file__).with_name("guard.cpp")


def torch_folder() -> Path:
    """Where torch is installed, without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def has_cuda() -> bool:
    """Whether torch is a CUDA build: that has the guard itself."""
    return (torch_folder() / "lib" / "libtorch_cuda.so").exists()


def missing() -> str | None:
    """Why the code of a GPU cannot be made here; None where it can."""
    if sys.platform != "linux":
        return "triton is there for Linux only"
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (it is in the dev extra)"
    if not has_cuda() and shutil.which("g++") is None:
        return "no g++, to build the device guard that a CPU build of torch lacks"
    return None


def cache_folder() -> Path:
    """The user's, for what takes long to build."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradsync_fx"


def build() -> Path:
    """The guard as a library; processes that build it at the same time end with the same file."""
    version = importlib.metadata.version("torch")
    name = hashlib.sha256(f"{version} {torch_folder()} {SOURCE.read_text()}".encode()).hexdigest()
    cache = cache_folder()
    library = cache / f"guard-{name[:16]}.so"
    if not library.exists():
        cache.mkdir(parents=True, exist_ok=True)
        torch = torch_folder()
        unfinished = library.with_suffix(f".{os.getpid()}")
        command = [
            "g++",
            "-shared",
            "-fPIC",
            "-O1",
            "-std=c++20",
            str(SOURCE),
            "-o",
            str(unfinished),
        ]
        includes = [f"-I{torch}/include", f"-I{torch}/include/torch/csrc/api/include"]
        links = [f"-L{torch}/lib", "-lc10", "-ltorch_cpu"]
        subprocess.run([*command, *includes, *links], check=True)
        unfinished.replace(library)
    return library


def load() -> None:
    """Makes fake CUDA tensors traceable in this process. Raises `RuntimeError` where torch is there already."""
    if has_cuda():
        return
    if "torch" in sys.modules:
        raise RuntimeError("torch has been imported: it asked for CUDA's hooks, and will not again")
    ctypes.CDLL(str(torch_folder() / "lib" / "libtorch_cpu.so"))
    ctypes.CDLL(str(build()))
