"""Atomic files: written beside their path and moved there, so that a file is whole or absent; checked when read."""

from __future__ import annotations

import os
import pickle
import secrets
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gradsync_fx.errors import StateError


FilePath = str | os.PathLike[str]


def write_data(path: FilePath, data: Any) -> None:
    """Tensors, numbers, texts and containers of them, in torch.save's format, as `in_place_of` writes files.

    Raises `StateError` also for data that `read_data` would refuse.
    """
    with in_place_of(path) as beside:
        try:
            with open(beside, "xb") as file:
                _save(data, file)
            torch.load(beside, map_location="cpu", weights_only=True, mmap=True)
        except pickle.UnpicklingError as failure:
            raise StateError(
                f"file {str(path)!r}",
                seen=f"what is to be saved could not be loaded as data ({_first_line(failure)})",
                wanted="state dicts of tensors, numbers, texts, and lists and dicts of them",
                fix="leave the object out, or save plain values of it; the file that was there is as it was",
            ) from failure


@contextmanager
def in_place_of(path: FilePath) -> Iterator[Path]:
    """A path beside this one, for a new file; when the block ends the file takes the place of the old one.

    Until the new file is on the disk, whole, the old one stays. Raises `StateError` when that fails; then, as after an
    interrupt, the old file is as it was and nothing is left beside it.
    """
    target = Path(os.path.realpath(path))  # a link stays, and what it leads to is replaced
    beside = target.with_name(f".{target.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield beside
        with open(beside, "rb") as file:
            os.fsync(file.fileno())
        os.replace(beside, target)
        _sync_folder(target.parent)
    except (OSError, RuntimeError) as failure:
        raise StateError(
            f"file {str(path)!r}",
            seen=f"it could not be written ({_first_line(_first_cause(failure))})",
            wanted="a folder that exists and may be written to, on a disk with room",
            fix="make room, or name another file; the file that was there is as it was",
        ) from failure
    finally:
        with suppress(OSError):
            beside.unlink()


def read_data(path: FilePath) -> Any:
    """What `write_data` wrote, on the CPU. Runs nothing that stands in the file.

    Raises `StateError` for a file that is cut short, was changed, or holds anything but data; `OSError` where there is
    none.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()  # torch does not look at the checksums that it writes
        if damaged is not None:
            raise zipfile.BadZipFile(f"the checksum of {damaged} is wrong")
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as failure:
        raise StateError(
            f"file {str(path)!r}",
            seen=f"it holds more than data, and is not run ({_first_line(failure)})",
            wanted="a file of step.save(path, ...)",
            fix="save it anew with step.save; do not load files of an origin that you do not trust",
        ) from failure
    except (zipfile.BadZipFile, RuntimeError, EOFError, ValueError, NotImplementedError) as failure:
        raise StateError(
            f"file {str(path)!r}",
            seen=f"it is damaged, or was not written by step.save ({_first_line(failure)})",
            wanted="a whole file of step.save(path, ...)",
            fix="load an earlier one",
        ) from failure


def _save(data: Any, file: Any) -> None:
    """torch.save, with checksums whatever the program has set."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        torch.save(data, file)
    finally:
        torch.serialization.set_crc32_options(before)


def _sync_folder(folder: Path) -> None:
    """The new name is on the disk, too, where the system can be asked for that."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _first_cause(failure: BaseException) -> BaseException:
    """The system's own error, the cause of torch's complaint about an archive that it could not end."""
    while not isinstance(failure, OSError) and failure.__context__ is not None:
        failure = failure.__context__
    return failure


def _first_line(failure: BaseException) -> str:
    return (str(failure).strip().splitlines() or [type(failure).__name__])[0]
