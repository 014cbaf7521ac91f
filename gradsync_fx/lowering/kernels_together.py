"""C++ kernels of a program are compiled together: alone, each spends more on torch's headers and on the linker than on
itself.

    kernels of a program -> not seen before -> as many files as threads -> libraries -> functions

Inductor makes a file and a library of each kernel (seen in 2.13: 0.8 s of headers and 0.5 s of linking for 0.3 s of
work). Here a few files hold them all, each kernel in a namespace of its own, under a name made of its source. A kernel
that an earlier program had is taken from that one's library: a small file for each kernel, beside Inductor's own cache,
says where it is. One that says something else leads to no kernel, never to another one: the name is not found.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from gradsync_fx._torch import inductor_cache_dir
from gradsync_fx._torch_cpp import (
    CppCompileError,
    CppKernel,
    LambdaFuture,
    binding_of,
    compile_command,
    get_compile_threads,
    in_place_of_cpp_kernels,
    kernel_is_logged,
    loaded_kernel,
    plain_cpp_kernel,
    started_library,
    write_atomic,
)
from gradsync_fx.disk_cache import note_used


log = logging.getLogger(__name__)

# A file of fewer letters than this is not worth its headers: about five kernels.
LEAST = 30_000

_DIRECTIVE = re.compile(r"^\s*#\s*(\w+)", re.MULTILINE)
_INCLUDE = re.compile(r"^\s*#\s*include\b.*$", re.MULTILINE)


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


@contextmanager
def kernels_together() -> Iterator[None]:
    """In the block Inductor's C++ kernels are compiled together, program by program."""
    batches: dict[int, tuple[Any, _Batch]] = {}

    def one(compiling: Any, types: list[str], text: str) -> Any:
        source = Source(tuple(types), text)
        if not source.can_be_joined:
            return plain_cpp_kernel(compiling, types, text)
        kernel_is_logged(text)
        if get_compile_threads() <= 1:  # whoever asks for a kernel has it at once
            return _Batch(compiling).add(source)()
        _, batch = batches.setdefault(id(compiling), (compiling, _Batch(compiling)))
        return LambdaFuture(batch.add(source))

    with in_place_of_cpp_kernels(one):
        yield


# Kernels of this process, by Inductor's cache folder and key.
_LOADED: dict[tuple[str, str], CppKernel] = {}


class _Batch:
    """Kernels of one program; compiled when the first of them is asked for. compiling: what Inductor compiles with."""

    def __init__(self, compiling: Any) -> None:
        self._compiling = compiling
        self._sources: list[Source] = []
        self._made: dict[Source, CppKernel] = {}

    def add(self, source: Source) -> Callable[[], CppKernel]:
        self._sources.append(source)
        return partial(self._get, source)

    def _get(self, source: Source) -> CppKernel:
        if source not in self._made:
            wanted = [s for s in dict.fromkeys(self._sources) if s not in self._made]
            try:
                self._made.update(kernels_of(wanted))
            except CppCompileError as failure:
                log.warning("%d kernels do not compile together: %s", len(wanted), failure)
                for one in wanted:
                    alone = plain_cpp_kernel(self._compiling, list(one.types), one.text)
                    self._made[one] = alone.result() if isinstance(alone, LambdaFuture) else alone
        return self._made[source]


def kernels_of(sources: list[Source]) -> dict[Source, CppKernel]:
    """The functions of these kernels: known ones, those of libraries on disk, and the rest compiled."""
    folder, command = inductor_cache_dir(), compile_command()
    names = {source: source.name(command) for source in sources}
    missing = []
    for source, name in names.items():
        if (folder, name) not in _LOADED:
            found = _on_disk(Path(folder), name)
            if found is None:
                missing.append(source)
            else:
                _LOADED[folder, name] = found
    parts = grouped(missing, get_compile_threads())
    started = [started_library(joined({names[s]: s for s in part})) for part in parts]
    for part, library in zip(parts, started, strict=True):
        path = library()
        for source in part:
            name = names[source]
            _LOADED[folder, name] = loaded_kernel(path, name)
            _write_note(Path(folder), name, path)
    return {source: _LOADED[folder, name] for source, name in names.items()}


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
