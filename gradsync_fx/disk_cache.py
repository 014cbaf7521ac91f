"""What processes leave for later ones: entries in the user's own cache folder, beside what Inductor keeps there.

    key + data -> <Inductor's cache folder>/gradsync_fx/graphs/<key> -> data, in any later process

An entry is plain data: reading it runs nothing. It is written beside its place and moved there, names its key, and
carries a checksum: one that is damaged or another's is ignored, with a line in the log, and written anew. Together they
take at most `LIMIT` bytes; the one that was not used for longest goes first. `TORCHINDUCTOR_FORCE_DISABLE_CACHES=1`
and `fx_graph_cache=False`, torch's own switches, turn it off.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Any

from gradsync_fx._torch import inductor_cache_dir, inductor_config


log = logging.getLogger(__name__)

LIMIT = 256 * 2**20
_FORMAT = b"gradsync_fx graph 1"


def entries_folder() -> Path:
    """Where entries are."""
    return Path(inductor_cache_dir(), "gradsync_fx", "graphs")


# Files of Inductor's cache folder that this process wrote or read, beside those that Inductor itself lists.
_USED: set[Path] = set()


def note_used(file: Path) -> None:
    """A program of this process was made from this file of the cache folder, or left it there."""
    _USED.add(file)


def used_files() -> dict[str, Path]:
    """Those that are there, by their place in the cache folder."""
    folder = Path(inductor_cache_dir())
    there = [file for file in sorted(_USED) if file.is_relative_to(folder) and file.is_file()]
    return {file.relative_to(folder).as_posix(): file for file in there}


def keeps_entries() -> bool:
    """Whether torch's settings let compilers keep anything."""
    return bool(inductor_config.fx_graph_cache and not inductor_config.force_disable_caches)


def key_of(*about: Any) -> str:
    """Equal for what is equal as text."""
    return hashlib.sha256("\0".join(map(str, about)).encode()).hexdigest()


def read_entry(key: str) -> Any:
    """The data that was written under this key; None where there is none, or what is there is not whole."""
    path = entries_folder() / key
    try:
        header, _, packed = path.read_bytes().partition(b"\n")
        if header != _header(key, packed):
            raise ValueError("its checksum, its key or its format is another")
        data = json.loads(zlib.decompress(packed))
        os.utime(path)
        note_used(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, zlib.error, RecursionError) as failure:
        ignore_entry(key, failure)
        return None
    return data


def ignore_entry(key: str, failure: Exception) -> None:
    """Says that an entry is of no use; the next one under this key takes its place."""
    log.warning(
        "%s is ignored, and made anew: %s: %s",
        entries_folder() / key,
        type(failure).__name__,
        failure,
    )


def write_entry(key: str, data: Any) -> None:
    """Keeps data, of numbers, texts, lists and dicts. A folder that cannot be written to keeps nothing."""
    path = entries_folder() / key
    packed = zlib.compress(json.dumps(data, separators=(",", ":"), allow_nan=False).encode(), 1)
    beside = path.with_name(f".{key[:16]}.{secrets.token_hex(4)}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(_header(key, packed) + b"\n" + packed)
        os.replace(beside, path)
        note_used(path)
        _make_room(path)
    except OSError as failure:
        log.info("nothing is kept for later processes: %s", failure)
        with suppress(OSError):
            beside.unlink()


def _header(key: str, packed: bytes) -> bytes:
    return b" ".join((_FORMAT, key.encode(), hashlib.sha256(packed).hexdigest().encode()))


def _files() -> list[tuple[float, int, Path]]:
    """Of the folder, by the time of their last use; what another process is writing, too."""
    found = []
    with suppress(OSError):
        for file in os.scandir(entries_folder()):
            with suppress(OSError):
                about = file.stat()
                found.append((about.st_mtime, about.st_size, Path(file.path)))
    return sorted(found)


def _make_room(latest: Path) -> None:
    files = _files()
    held = sum(size for _, size, _ in files)
    for _, size, path in files:
        if held <= LIMIT:
            return
        if path != latest:
            with suppress(OSError):
                path.unlink()
            held -= size


def held_entries() -> tuple[int, int]:
    """How many entries there are, and their bytes."""
    files = _files()
    return len(files), sum(size for _, size, _ in files)


def clear_entries() -> int:
    """Deletes all entries; returns how many."""
    files = _files()
    for _, _, path in files:
        with suppress(OSError):
            path.unlink()
    return len(files)
