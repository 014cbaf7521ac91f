"""What a long call is doing, told on stderr: a first call traces and compiles, which may take a minute.

On a terminal one line, written anew and gone when the call ends; in a log one line for each stage. Nothing before a
call has taken some seconds, and nothing on ranks other than the first.

    with LongCall(verbose):                 a call of a step; costs next to nothing where it has no stages
        with stage("compiling x"):          what takes long, wherever it is done
            detail("2/7")                   how far that is
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TextIO

import torch.distributed as dist


PATIENCE = 2.0  # seconds that a call may take before anything is said
_REFRESH = 0.5
_CLEARED = "\r\x1b[K"


class LongCall:
    """The block that is a call; for one that runs inside of another, the outer one speaks.

    verbose: whether it says anything. The watching thread is there from its first stage to its end.
    """

    def __init__(self, verbose: bool) -> None:
        self.verbose = verbose
        self._token: Token[LongCall | None] | None = None
        self._doing: list[str] = []
        self._detail = ""
        self._lock = threading.Lock()
        self._over: threading.Event | None = None
        self._watcher: threading.Thread | None = None
        self._begun = 0.0
        self._late = False

    def __enter__(self) -> None:
        if _CALL.get() is None:
            self._token = _CALL.set(self)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._token is not None:
            _CALL.reset(self._token)
        if self._over is not None and self._watcher is not None:
            self._over.set()
            self._watcher.join()

    def enter(self, doing: str) -> None:
        """A stage begins, perhaps inside of another."""
        with self._lock:
            self._doing.append(doing)
            self._detail = ""
            if self._over is None and self.verbose and PATIENCE < threading.TIMEOUT_MAX:
                self._begun, self._over = time.monotonic(), threading.Event()
                self._watcher = threading.Thread(
                    target=self._watch, args=(self._over,), name="gradsync_fx progress", daemon=True
                )
                self._watcher.start()
            elif self._late:
                self._tell()

    def leave(self) -> None:
        """The innermost stage is over."""
        with self._lock:
            self._doing.pop()
            self._detail = ""

    def detail(self, text: str) -> None:
        """How far the innermost stage is."""
        self._detail = text

    def _watch(self, over: threading.Event) -> None:
        if over.wait(PATIENCE) or not _is_first():
            return
        with self._lock:
            self._late = True
            self._tell()
        terminal = _terminal()
        while terminal is not None and not over.wait(_REFRESH):
            with self._lock:
                self._tell()
        if terminal is not None:
            _write(terminal, _CLEARED)

    def _tell(self) -> None:
        terminal = _terminal()
        if not self._doing:
            _write(terminal, _CLEARED)
        elif terminal is None:
            _write(sys.stderr, f"gradsync_fx: {self._doing[-1]}\n")
        else:
            seconds = time.monotonic() - self._begun
            done = f"{self._doing[-1]} {self._detail}".rstrip()
            _write(terminal, f"{_CLEARED}gradsync_fx: {done} ({seconds:.0f} s)")


_CALL: ContextVar[LongCall | None] = ContextVar("gradsync_fx call", default=None)


@contextmanager
def stage(doing: str) -> Iterator[None]:
    """What is done in this block, for people: the beginning of a line."""
    call = _CALL.get()
    if call is None:
        yield
        return
    call.enter(doing)
    try:
        yield
    finally:
        call.leave()


def detail(text: str) -> None:
    """How far the stage is; shown on terminals only."""
    call = _CALL.get()
    if call is not None:
        call.detail(text)


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _terminal() -> TextIO | None:
    """Where a line can be written anew."""
    stream: TextIO | None = sys.stderr
    try:
        return stream if stream is not None and stream.isatty() else None
    except ValueError:  # it is closed
        return None


def _write(stream: TextIO | None, text: str) -> None:
    """Nobody's call fails because nothing reads what it says."""
    try:
        if stream is not None:
            stream.write(text)
            stream.flush()
    except (OSError, ValueError):
        return
