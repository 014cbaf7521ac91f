"""How much memory a way needs, of a process that it has to itself.

What Dynamo and Inductor leave behind in the process is no part of it: at rest, between two windows, we ask malloc for
what is mapped in large blocks (tensors; the parent sets MALLOC_MMAP_THRESHOLD_ for that), and the kernel's own mark of
the highest resident size says how much further a window goes.
"""

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path

import torch


LARGE = 65_536  # bytes from which malloc maps a block of its own
ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": str(LARGE), "MALLOC_MMAP_MAX_": "1000000"}


class _MallInfo(ctypes.Structure):
    names = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
    _fields_ = [(name, ctypes.c_size_t) for name in names.split()]


def resting(device: torch.device) -> int | None:
    """Bytes in tensors now; None where the C library does not tell."""
    gc.collect()
    if device.type == "cuda":
        return torch.cuda.memory_allocated()
    try:
        ask = ctypes.CDLL(None).mallinfo2
    except AttributeError:  # not glibc, or older than 2.33
        return None
    ask.restype = _MallInfo
    return ask().hblkhd + _shared()


def _shared() -> int:
    """This process's part of the memory that it shares with others, in which gradsync_fx may have its running sums."""
    try:
        return _kib(Path("/proc/self/smaps_rollup"), "Pss_Shmem")
    except OSError:
        return 0


def growth(window: Callable[[], None], device: torch.device) -> int | None:
    """Bytes by which a window goes beyond what was there at its start, at its highest."""
    gc.collect()
    if device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        window()
        return torch.cuda.max_memory_allocated() - before
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the mark falls to the present size
        before = _status("VmRSS")
        window()
        return max(0, _status("VmHWM") - before)
    except OSError:  # not Linux, or not allowed
        return None


def resident() -> int | None:
    """The size in memory now."""
    try:
        return _status("VmRSS")
    except OSError:  # not Linux
        return None


def highest_resident() -> int | None:
    """The highest resident size since the mark was last set back."""
    try:
        return _status("VmHWM")
    except OSError:
        return None


def _status(field: str) -> int:
    return _kib(Path("/proc/self/status"), field)


def _kib(file: Path, field: str) -> int:
    """A field that the kernel gives in KiB, in bytes."""
    for line in file.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field}")
