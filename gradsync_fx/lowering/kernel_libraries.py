"""Libraries of several C++ kernels: which kernels are on disk, which files the rest go into, and how a file is written.

    kernels -> not seen before -> as many files as threads -> libraries -> functions

Each kernel stands in a namespace of its own, under a name made of its source. A kernel that an earlier program had is
taken from that one's library: a small file for each kernel, beside Inductor's own cache, says where it is. One that
says something else leads to no kernel, never to another one: the name is not found.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from gradsync_fx._torch import inductor_cache_dir
from gradsync_fx._torch_cpp import (
    CppKernel,
    binding_of,
    compile_command,
    get_compile_threads,
    loaded_kernel,
    started_library,
    write_atomic,
)
from gradsync_fx.disk_cache import note_used


log = logging.getLogger(__name__)

# A file of fewer letters than this is not worth its headers: about five kernels.
LEAST = 30_000

_DIRECTIVE = re.compile(r"^\s*#\s*(\w+)", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)

Kernels = dict["Source", CppKernel]


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel as Inductor writes it: a C function `kernel`, and the types of its arguments."""

    types: tuple[str, ...]
    text: str

    def name(self, command: str) -> str:
        """Equal for kernels that one library serves: those of one source, made by the same compiler's command."""
        about = (torch.__version__, command, self.types, self.text)
        digest = hashlib.sha256("\0".join(map(str, about)).encode()).hexdigest()
        return f"kernel_{digest[:32]}"

    @property
    def can_be_joined(self) -> bool:
        """Whether other kernels may stand in the same file: it defines no macro, and asks for none."""
        return set(_DIRECTIVE.findall(self.text)) <= {"include", "pragma"}


# Kernels of this process by Inductor's cache folder and name: those that are there, and those on their way, each with
# what waits for its library.
_LOADED: dict[tuple[str, str], CppKernel] = {}
_STARTED: dict[tuple[str, str], Callable[[], Path]] = {}


@dataclass(frozen=True, slots=True)
class StartedKernels:
    """Kernels that are there, or on their way. names: of each source. folder: of Inductor's cache. libraries: by name
    what waits for the library of one that is not there."""

    folder: str
    names: dict[Source, str]
    libraries: dict[str, Callable[[], Path]]

    @property
    def there(self) -> bool:
        """Whether nothing has to be waited for."""
        return all((self.folder, name) in _LOADED for name in self.names.values())

    def wait(self) -> Kernels:
        """Their functions. Raises what the compiler does, and `ImportError` or `OSError` for a damaged library."""
        for name in self.names.values():
            key = self.folder, name
            if key in _LOADED:
                continue
            try:
                path = self.libraries[name]()
                _LOADED[key] = loaded_kernel(path, name)
            finally:
                _STARTED.pop(key, None)  # one that failed may be tried once more
            _write_note(Path(self.folder), name, path)
        return {source: _LOADED[self.folder, name] for source, name in self.names.items()}


def start_kernels(sources: Sequence[Source]) -> StartedKernels:
    """Finds these kernels in this process or on disk, and begins to compile the rest."""
    folder, command = inductor_cache_dir(), compile_command()
    names = {source: source.name(command) for source in sources}
    missing = []
    for source, name in names.items():
        if (folder, name) in _LOADED or (folder, name) in _STARTED:
            continue
        found = _on_disk(Path(folder), name)
        if found is None:
            missing.append(source)
        else:
            _LOADED[folder, name] = found
    for part in grouped(missing, get_compile_threads()):
        library = started_library(joined({names[s]: s for s in part}))
        _STARTED.update(((folder, names[s]), library) for s in part)
    libraries = {
        name: _STARTED[folder, name] for name in names.values() if (folder, name) in _STARTED
    }
    return StartedKernels(folder, names, libraries)


def kernels_of(sources: Sequence[Source]) -> Kernels:
    """The functions of these kernels: known ones, those of libraries on disk, and the rest compiled."""
    return start_kernels(sources).wait()


def _note(folder: Path, name: str) -> Path:
    return folder / "gradsync_fx" / "kernels" / name[-2:] / name


def _write_note(folder: Path, name: str, library: Path) -> None:
    """Without it the next process compiles the kernel again, no more."""
    if library.is_relative_to(folder):
        note = str(_note(folder, name))
        try:
            write_atomic(note, str(library.relative_to(folder)), make_dirs=True)
            note_used(_note(folder, name))
            note_used(library)
        except OSError as failure:
            log.info("no note of where a kernel is: %s", failure)


def _on_disk(folder: Path, name: str) -> CppKernel | None:
    """A kernel of a library in this folder, if its note leads to one that has it."""
    try:
        note = _note(folder, name)
        library = folder / note.read_text()
        if library.resolve().is_relative_to(folder.resolve()) and library.is_file():
            kernel = loaded_kernel(library.resolve(), name)
            note_used(note)
            note_used(library)
            return kernel
    except (OSError, ValueError, ImportError) as failure:
        log.debug("no library of %s: %s", name, failure)
    return None


def grouped(sources: list[Source], threads: int) -> list[list[Source]]:
    """Kernels in groups of about equal length, one for each thread, where there is enough for all."""
    letters = sum(len(s.text) for s in sources)
    count = max(1, min(threads, len(sources), letters // LEAST))
    groups: list[list[Source]] = [[] for _ in range(count if sources else 0)]
    sizes = [0] * count
    for source in sorted(sources, key=lambda s: len(s.text), reverse=True):
        least = sizes.index(min(sizes))
        groups[least].append(source)
        sizes[least] += len(source.text)
    return groups


def joined(sources: dict[str, Source]) -> str:
    """One file of several kernels, by name: what they include first, then each in a namespace."""
    whole = [(name, s.text, binding_of(name, list(s.types))) for name, s in sources.items()]
    texts = [text for _, *both in whole for text in both]
    includes = dict.fromkeys(line.strip() for text in texts for line in _INCLUDE.findall(text))
    lines = ["#define PY_SSIZE_T_CLEAN", *includes]
    for name, text, binding in whole:
        binding = re.sub(r"^#define PY_SSIZE_T_CLEAN$", "", binding, flags=re.MULTILINE)
        lines += [
            f"namespace of_{name} {{",
            f"#define kernel {name}",
            _INCLUDE.sub("", text),
            "#undef kernel",
            _INCLUDE.sub("", binding),
            "}",
        ]
    return "\n".join(lines) + "\n"
