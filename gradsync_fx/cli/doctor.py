"""`gradsync-fx doctor`: checks that this machine has what gradsync_fx needs, each by trying it.

What a check looks for may be broken (a missing name of torch, a compiler that hangs, a missing folder): that is the
check's result, and never an error.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from gradsync_fx._torch import (
    NEWEST,
    OLDEST,
    get_cpp_compiler,
    inductor_cache_dir,
    torch_version,
)


OK, WARN, FAIL = "ok", "warn", "fail"
COMPILE_SECONDS = 60.0
OPTIONAL = {
    "transformers": "examples/finetune_bert.py",
    "scikit-learn": "examples/train_digits.py",
}
SOURCE = """
#include <cmath>
#include <vector>
extern "C" float total(const float* x, long n) {
    float sum = 0;
    #pragma omp parallel for reduction(+:sum)
    for (long i = 0; i < n; i++) sum += std::exp(x[i]);
    return sum;
}
"""


@dataclass(frozen=True, slots=True)
class Check:
    """One line. fix: what to do, "" where there is nothing to do."""

    name: str
    status: str
    detail: str
    fix: str = ""


def examine() -> Iterator[Check]:
    """All checks, one by one as they are done; some take seconds."""
    checks: tuple[Callable[[], Iterator[Check]], ...] = (
        _python, _torch, _compiler, _headers, _distributed, _devices, _cache, _entry, _optional,
    )  # fmt: skip
    for check in checks:
        try:
            yield from check()
        except Exception as error:
            yield Check(
                check.__name__.strip("_"),
                WARN,
                f"could not be found out: {type(error).__name__}: {error}",
                "report this to gradsync_fx",
            )


def _python() -> Iterator[Check]:
    yield Check("python", OK, f"{platform.python_version()} ({sys.executable})")


def _torch() -> Iterator[Check]:
    tested = f"tested: {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]}"
    if OLDEST <= torch_version() <= NEWEST:
        yield Check("torch", OK, f"{torch.__version__} ({tested})")
    else:
        fix = f"pip install 'torch>={OLDEST[0]}.{OLDEST[1]},<{NEWEST[0]}.{NEWEST[1] + 1}'"
        yield Check("torch", FAIL, f"{torch.__version__} ({tested})", fix)


def _compiler() -> Iterator[Check]:
    fix = "install g++ or clang++ (Debian: apt install g++), or use backend='aot_eager'"
    try:
        compiler = str(get_cpp_compiler())
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        yield Check("C++ compiler", FAIL, lines[0], fix)
        return
    said = _compiles(compiler, "-fopenmp")
    if not said:
        yield Check("C++ compiler", OK, f"{compiler} compiles, with OpenMP")
        return
    without = _compiles(compiler)
    if without:
        yield Check("C++ compiler", FAIL, f"{compiler}: {without}", fix)
    else:
        more = "install OpenMP for it (libgomp, libomp): compiled programs are linked with it"
        yield Check("C++ compiler", WARN, f"{compiler} compiles, but not with OpenMP: {said}", more)


def _compiles(compiler: str, *flags: str) -> str:
    """Compiles a few lines into a library. Returns what went wrong, "" for nothing."""
    with tempfile.TemporaryDirectory(prefix="gradsync-fx-") as folder:
        source = Path(folder) / "total.cpp"
        source.write_text(SOURCE)
        library = ["-std=c++17", "-O2", "-shared", "-fPIC", *flags, "-o", f"{folder}/total.so"]
        try:
            done = subprocess.run(
                [*shlex.split(compiler), *library, str(source)],
                capture_output=True,
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=COMPILE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            return f"did not compile six lines within {COMPILE_SECONDS:g} s"
        except OSError as error:
            return str(error)
    said = [line for line in done.stderr.splitlines() if "error" in line] or ["no message"]
    return "" if done.returncode == 0 else f"exit status {done.returncode}: {said[0].strip()}"


def _headers() -> Iterator[Check]:
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if header.is_file():
        yield Check("Python.h", OK, str(header))
    else:
        fix = "install Python's headers (Debian: apt install python3-dev): Inductor compiles with them"
        yield Check("Python.h", FAIL, f"{header} is missing", fix)


def _distributed() -> Iterator[Check]:
    if not dist.is_available():
        fix = "install a torch with distributed to train on several ranks; one rank works"
        yield Check("torch.distributed", WARN, "not in this torch", fix)
        return
    found = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
    has = ", ".join(name for name, there in found.items() if there) or "no backend"
    lacks = ", ".join(name for name, there in found.items() if not there)
    detail = has + (f" (not in this torch: {lacks})" if lacks else "")
    if torch.cuda.is_available() and not found["nccl"]:
        fix = "install a torch with NCCL to train on several GPUs"
    elif not found["gloo"]:
        fix = "install a torch with gloo to train on several ranks of a CPU"
    else:
        fix = ""
    yield Check("torch.distributed", WARN if fix else OK, detail, fix)


def _devices() -> Iterator[Check]:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    names = [torch.cuda.get_device_name(i) for i in range(count)]
    kinds = ", ".join(f"{names.count(n)} x {n}" for n in dict.fromkeys(names))
    if count:
        yield Check("CUDA devices", OK, kinds)
    elif torch.version.cuda:
        fix = "look at nvidia-smi and CUDA_VISIBLE_DEVICES, unless the CPU is meant"
        yield Check("CUDA devices", WARN, f"none, though torch has CUDA {torch.version.cuda}", fix)
    else:
        yield Check("CUDA devices", OK, "none; this torch is for the CPU")


def _cache() -> Iterator[Check]:
    fix = "point TORCHINDUCTOR_CACHE_DIR to a folder of yours, on a disk with space"
    try:
        folder = Path(inductor_cache_dir())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Check("cache", FAIL, f"cannot be written: {error}", fix)
        return
    size = sum(p.lstat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    detail = f"{folder}: {_bytes(size)} used, {_bytes(free)} free"
    if free < 1 << 30:
        yield Check("cache", WARN, detail, "less than 1 GiB is free: " + fix)
    else:
        yield Check("cache", OK, detail)


def _entry() -> Iterator[Check]:
    name = 'backend="gradsync"'
    found = list(importlib.metadata.entry_points(group="torch_dynamo_backends", name="gradsync"))
    fix = "install the package (pip install gradsync_fx, or -e . in a checkout)"
    if not found:
        seen = "torch.compile does not know it: no entry in torch_dynamo_backends"
        yield Check(name, WARN, seen, f"{fix}; gradsync_fx.optimize works without")
        return
    try:
        found[0].load()
    except Exception as error:
        seen = f"{found[0].value} cannot be loaded: {type(error).__name__}: {error}"
        yield Check(name, FAIL, seen, f"{fix} anew")
    else:
        yield Check(name, OK, f"torch.compile finds {found[0].value}")


def _optional() -> Iterator[Check]:
    for name, used in OPTIONAL.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, WARN, f"not installed; for {used}", f"pip install {name}, if wanted")
        else:
            yield Check(name, OK, f"{version}; for {used}")
    drawer = shutil.which("dot")
    if drawer:
        yield Check("graphviz", OK, f"{drawer}; draws what --dot writes")
    else:
        fix = "install graphviz, if wanted"
        yield Check("graphviz", WARN, "no dot; it draws what --dot writes", fix)


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
