"""Memory that the other processes of this machine can map: a file without a name, gone with its last process.

A process that has it open is the way to it, /proc/<process>/fd/<file>. That leads elsewhere, or nowhere, for another
user, machine or container; then there is no reaching it. Linux only: without such files the memory is ordinary.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch


PAGE = mmap.PAGESIZE


@dataclass(frozen=True, slots=True)
class Address:
    """Where a stretch of shared memory lies; sizes and places in bytes.

    machine: the kernel that booted, and the network that its processes see: what lies behind another network is
    taken for another machine.
    """

    machine: str
    process: int
    file: int
    device: int
    inode: int
    size: int
    begin: int
    end: int


class Room:
    """Zeros, handed out in stretches. They take up memory when they are first written."""

    def __init__(self, file: int, size: int) -> None:
        """file: open and of this size, in bytes. It is closed when the last stretch is gone."""
        mapped = mmap.mmap(file, size)
        self._bytes = torch.frombuffer(mapped, dtype=torch.uint8)
        self._taken = 0
        begin = self._bytes.data_ptr()
        _FILES[begin] = (file, size)
        weakref.finalize(mapped, _close, begin)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `count` zeros, flat; they start a page."""
        begin, size = self._taken, count * dtype.itemsize
        self._taken += -(-size // PAGE) * PAGE
        return self._bytes[begin : begin + size].view(dtype)


def open_room(sizes: Sequence[int]) -> Room | None:
    """Room for stretches of so many bytes; None for none of them, and where the system has no memory to share."""
    if not sizes or not hasattr(os, "memfd_create"):
        return None
    size = sum(-(-s // PAGE) * PAGE for s in sizes)
    try:
        file = os.memfd_create("gradsync_fx")
    except OSError:
        return None
    try:
        os.ftruncate(file, size)
        return Room(file, size)
    except OSError:
        os.close(file)
        return None


# Open files, with their size, by the place of their memory.
_FILES: dict[int, tuple[int, int]] = {}


def _close(begin: int) -> None:
    file, _ = _FILES.pop(begin)
    os.close(file)


def address(flat: torch.Tensor) -> Address | None:
    """Where others find this tensor, which lies in one stretch; None where they can't."""
    base = flat.untyped_storage().data_ptr()
    if base not in _FILES:
        return None
    file, size = _FILES[base]
    about = os.fstat(file)
    begin = flat.data_ptr() - base
    end = begin + flat.numel() * flat.itemsize
    return Address(_machine(), os.getpid(), file, about.st_dev, about.st_ino, size, begin, end)


def _machine() -> str:
    booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{booted} {os.stat('/proc/self/ns/net').st_ino}"


class Reached:
    """Memory of other processes, each file mapped once."""

    def __init__(self) -> None:
        self._mapped: dict[tuple[int, int], torch.Tensor] = {}

    def tensor(self, there: Address, dtype: torch.dtype) -> torch.Tensor | None:
        """The same memory, in this process; None where it can't be reached."""
        key = (there.device, there.inode)
        if key not in self._mapped:
            mapped = _map(there) if there.machine == _machine() else None
            if mapped is None:
                return None
            self._mapped[key] = mapped
        return self._mapped[key][there.begin : there.end].view(dtype)


def _map(there: Address) -> torch.Tensor | None:
    path = f"/proc/{there.process}/fd/{there.file}"
    try:
        # Looked at before it is opened: among processes numbered otherwise this is some other file.
        if not _is(os.stat(path), there):
            return None
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        if not _is(os.fstat(file), there):
            return None
        return torch.frombuffer(mmap.mmap(file, there.size), dtype=torch.uint8)
    except OSError:
        return None
    finally:
        os.close(file)  # the mapping has its own


def _is(about: os.stat_result, there: Address) -> bool:
    return (about.st_dev, about.st_ino, about.st_size) == (there.device, there.inode, there.size)
