"""C++ kernels of a program are compiled together, and beside the work on the next program.

    a kernel's source -> batch of its program -> libraries (kernel_libraries.py) -> functions, put into the program

Inductor makes a file and a library of each C++ kernel (seen in 2.13: 0.8 s of headers and 0.5 s of linking for 0.3 s
of work), and waits for them before it goes on. Here a program's kernels share a few files; and in a block of
`kernels_later` their compilation goes on while other programs are made: all of them are there at its end.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from gradsync_fx._torch import fresh_cache, inductor_cache_dir
from gradsync_fx._torch_cpp import (
    CppCompileError,
    CppKernel,
    LambdaFuture,
    get_compile_threads,
    in_place_of_cpp_kernels,
    in_place_of_waits,
    kernel_is_logged,
    plain_cpp_kernel,
    plain_wait,
)
from gradsync_fx.lowering.kernel_libraries import (
    Kernels,
    Source,
    StartedKernels,
    kernels_of,
    start_kernels,
)
from gradsync_fx.progress import stage
from gradsync_fx.user_lines import warn_user


log = logging.getLogger(__name__)


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
            return _Batch(compiling).add(source).result()
        _, batch = batches.setdefault(id(compiling), (compiling, _Batch(compiling)))
        return batch.add(source)

    def wait(compiling: Any, scope: dict[str, Any]) -> None:
        _, batch = batches.get(id(compiling), (None, None))
        if _LATER.depth and batch is not None and not batch.start().there:
            ours = set(map(id, batch.futures))
            later = {name: value for name, value in scope.items() if id(value) in ours}
            for name in later:
                del scope[name]
            plain_wait(compiling, scope)
            scope.update(later)
            _LATER.programs.append((scope, later))
        else:
            plain_wait(compiling, scope)

    with in_place_of_cpp_kernels(one), in_place_of_waits(wait):
        yield


class _Batch:
    """Kernels of one program; started when the first of them is asked for. compiling: what Inductor compiles with."""

    def __init__(self, compiling: Any) -> None:
        self._compiling = compiling
        self._sources: list[Source] = []
        self._started: StartedKernels | None = None
        self._made: Kernels = {}
        self.futures: list[LambdaFuture] = []

    def add(self, source: Source) -> LambdaFuture:
        self._sources.append(source)
        future = LambdaFuture(partial(self._get, source))
        self.futures.append(future)
        return future

    def start(self) -> StartedKernels:
        if self._started is None:
            self._started = start_kernels(self._sources)
        return self._started

    def _get(self, source: Source) -> CppKernel:
        if source not in self._made:
            try:
                self._made = self.start().wait()
            except CppCompileError as failure:
                log.warning("%d kernels do not compile together: %s", len(self._sources), failure)
                self._made = self._alone()
            except (ImportError, OSError) as failure:
                self._made = self._beside(failure)
        return self._made[source]

    def _alone(self) -> Kernels:
        made = {}
        for one in dict.fromkeys(self._sources):
            alone = plain_cpp_kernel(self._compiling, list(one.types), one.text)
            made[one] = alone.result() if isinstance(alone, LambdaFuture) else alone
        return made

    def _beside(self, failure: Exception) -> Kernels:
        """Past the files of Inductor's cache, of which one is torn."""
        with compiled_beside(failure):
            return kernels_of(self._sources)


@contextmanager
def compiled_beside(failure: Exception) -> Iterator[None]:
    """In the block Inductor's cache is a folder of its own. A file of the user's may be torn: by a full disk, or a
    process that was killed.

    failure: of compiling with the user's folder; it goes on unless the block succeeds.
    """
    folder, beside = inductor_cache_dir(), tempfile.mkdtemp(prefix="gradsync_fx-")
    try:
        with fresh_cache(dir=beside, delete=False):  # kernels may be loaded later
            yield
    except Exception:
        shutil.rmtree(beside, ignore_errors=True)
        raise failure from failure.__cause__
    warn_user(
        f"a file in Inductor's cache is damaged ({type(failure).__name__}); the program was compiled anew, beside it. "
        f"To have it cached again, delete {folder}, or set TORCHINDUCTOR_CACHE_DIR to another folder"
    )


@dataclass(slots=True)
class _Later:
    """depth: of blocks of `kernels_later`. programs: whose kernels are on their way: what their code sees, and the
    futures that stand in it by name."""

    depth: int = 0
    programs: list[tuple[dict[str, Any], dict[str, LambdaFuture]]] = field(default_factory=list)


_LATER = _Later()


@contextmanager
def kernels_later() -> Iterator[None]:
    """At the end of the outermost block the kernels of all programs that were made in it are there; not before.

    One block at a time: programs are compiled under a lock.
    """
    _LATER.depth += 1
    try:
        yield
    finally:
        _LATER.depth -= 1
        if not _LATER.depth:
            wait_for_kernels()


def kernels_on_their_way() -> bool:
    """Whether compilers are at work for a program that was made in this block of `kernels_later`."""
    return bool(_LATER.programs)


def interrupted() -> bool:
    """Whether such a block ended before its kernels were there: by Ctrl+C."""
    return not _LATER.depth and bool(_LATER.programs)


def wait_for_kernels() -> None:
    """From here on all programs can run. Raises what a compiler did; so does a kernel that it did not make."""
    if not _LATER.programs:
        return
    failures: list[Exception] = []
    with stage("compiling kernels"):
        while _LATER.programs:
            scope, later = _LATER.programs[-1]
            for name, future in later.items():
                try:
                    scope[name] = future.result()
                except Exception as failure:
                    failures.append(failure)
                    scope[name] = partial(_fail, failure)
            _LATER.programs.pop()
    if failures:
        raise failures[0]


def _fail(failure: Exception, *_: Any) -> NoReturn:
    raise failure
