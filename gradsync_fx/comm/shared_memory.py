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
    """Where a stretch of shared memory lies; sizes and offsets in bytes.

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
        self._mapped, self._file, self._size, self._taken = mmap.mmap(file, size), file, size, 0
        weakref.finalize(self._mapped, _close, file)

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next `count` zeros, flat; they start a page, and are a storage of their own.

        Who waits for a functional collective waits for all that run on the same storage.
        """
        begin = self._taken
        self._taken += _whole_pages(count * dtype.itemsize)
        flat = torch.frombuffer(self._mapped, dtype=dtype, count=count, offset=begin)
        _STRETCHES[flat.data_ptr()] = _Stretch(self._file, self._size, begin)
        return flat


def open_room(sizes: Sequence[int]) -> Room | None:
    """Room for stretches of so many bytes; None for none of them, and where the system has no memory to share."""
    if not sizes or not hasattr(os, "memfd_create"):
        return None
    size = sum(_whole_pages(stretch) for stretch in sizes)
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


def _whole_pages(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Of an open file, whole size with it."""

    file: int
    size: int
    begin: int


_STRETCHES: dict[int, _Stretch] = {}  # by their address


def _close(file: int) -> None:
    for place in [place for place, stretch in _STRETCHES.items() if stretch.file == file]:
        del _STRETCHES[place]
    os.close(file)


def address(flat: torch.Tensor) -> Address | None:
    """Where others find this tensor, which lies in one stretch; None where they can't."""
    place = flat.untyped_storage().data_ptr()
    stretch, machine = _STRETCHES.get(place), _machine()
    if stretch is None or machine is None:
        return None
    about = os.fstat(stretch.file)
    begin = stretch.begin + flat.data_ptr() - place
    return Address(
        machine=machine,
        process=os.getpid(),
        file=stretch.file,
        device=about.st_dev,
        inode=about.st_ino,
        size=stretch.size,
        begin=begin,
        end=begin + flat.numel() * flat.itemsize,
    )


def _machine() -> str | None:
    try:
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return None  # no /proc, no way to others


class MappedFiles:
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
