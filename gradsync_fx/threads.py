"""Mutual exclusion of threads: refuses a second thread that uses one step, or patches torch, at the same time.

Captures and compilations are serialized by Dynamo's own lock; a thread that waits for it holds no other lock. Elsewhere
waiting could deadlock, as the threads of two ranks may come in different orders: there the second thread is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gradsync_fx.errors import WindowError


class OneAtATime:
    """Refuses a second thread while one is inside; the same thread may enter again."""

    def __init__(self, what: str, fix: str) -> None:
        self._what, self._fix = what, fix
        self._lock, self._inside = threading.RLock(), ""
        self._shut: WindowError | None = None

    @contextmanager
    def shut(self, refusal: WindowError) -> Iterator[None]:
        """While the block runs, inside of `held`, nobody enters again: it raises `refusal`."""
        self._shut = refusal
        try:
            yield
        finally:
            self._shut = None

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises `WindowError`, with the names of both threads."""
        if self._shut is not None:
            raise self._shut
        me = threading.current_thread().name
        if not self._lock.acquire(blocking=False):
            raise WindowError(
                self._what,
                seen=f"thread {me!r} uses it while thread {self._inside!r} is inside of it",
                wanted="one thread at a time",
                fix=self._fix,
            )
        before, self._inside = self._inside, me
        try:
            yield
        finally:
            self._inside = before
            self._lock.release()


def in_this_thread(new: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    """A patch that other threads do not see: what runs there stays `plain`."""
    mine = threading.get_ident()

    def call(*args: Any, **kwargs: Any) -> Any:
        return (new if threading.get_ident() == mine else plain)(*args, **kwargs)

    return call


# Eager calls of a step are answered by patches of torch: one thread's would be restored by another.
EAGER_CALLS = OneAtATime(
    "a step that runs eagerly",
    fix="run such steps in one thread, or each in a process; steps that are captured may have a thread each",
)
