"""Watches the first windows of whatever trains in a block, judges them as `diagnose` does, and then watches no more.

The end of the watch lies in the backward after the last window that is wanted: what a window leaves behind shows there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from gradsync_fx.diagnosis.events import Stepped
from gradsync_fx.diagnosis.findings import Diagnosis
from gradsync_fx.diagnosis.judgement import judged, world_of
from gradsync_fx.diagnosis.watch import Watch, watching
from gradsync_fx.diagnosis.windows import Window, windows


@dataclass(frozen=True, slots=True)
class ScriptSeen:
    """What was seen of a script.

    diagnosis: None where it trained nothing, or failed before its first update. micro_steps: how many were seen.
    guessed: whether the number meant for a window was taken from what was seen. rank: of this process. running: the
    script goes on.
    """

    diagnosis: Diagnosis | None
    micro_steps: int
    guessed: bool
    rank: int
    running: bool


@contextmanager
def first_windows(
    count: int, micro_steps: int | None, tell: Callable[[ScriptSeen], None]
) -> Iterator[None]:
    """Watches the block until `count` windows are whole, or it ends.

    micro_steps: meant for a window; None: the most frequent length. tell: called once, when nothing is watched any
    more; what it raises while the block runs is raised there.
    """
    with ExitStack() as stack:
        watch = stack.enter_context(watching(None))
        session = _Session(watch, count, micro_steps)

        def after_backward() -> None:
            session.look()
            if session.enough():
                stack.close()
                session.over = True
                tell(session.seen(cut=True, running=True))

        watch.after_backward = after_backward
        failed = True
        try:
            yield
            failed = False
        except SystemExit:
            failed = False
            raise
        finally:
            stack.close()
            if not session.over:
                tell(session.seen(cut=failed, running=False))


class _Session:
    """What one watch knows beside its events. Ranks are asked for while there is a group: a script may end it."""

    def __init__(self, watch: Watch, count: int, micro_steps: int | None) -> None:
        self.watch, self.count, self.micro_steps = watch, count, micro_steps
        self.over = False
        self._rank, self._world = 0, 1
        self._looked_at, self._updates = 0, 0

    def look(self) -> None:
        """After a backward."""
        if dist.is_available() and dist.is_initialized():
            self._rank, self._world = dist.get_rank(), world_of(self.watch)
        fresh = self.watch.events[self._looked_at :]
        self._updates += any(isinstance(event, Stepped) for event in fresh)
        self._looked_at += len(fresh)

    def enough(self) -> bool:
        """Whether the windows are whole, and the next one has begun."""
        if self._updates < self.count:
            return False
        found = windows(self.watch.events)
        begun = bool(found and found[-1].micro_steps and not found[-1].steps)
        return begun and len(_closed(found)) >= self.count

    def seen(self, *, cut: bool, running: bool) -> ScriptSeen:
        """cut: the script was not seen to its end."""
        found = windows(self.watch.events)
        total = sum(len(w.micro_steps) for w in found)
        diagnosis = None
        if _closed(found) or (total and not cut):
            k = self.micro_steps or _usual_length(found)
            diagnosis = judged(self.watch, found, k, self._world, cut=cut)
        return ScriptSeen(diagnosis, total, self.micro_steps is None, self._rank, running)


def _closed(found: tuple[Window, ...]) -> list[Window]:
    return [w for w in found if w.steps]


def _usual_length(found: tuple[Window, ...]) -> int:
    """The most frequent number of micro-steps, of several the largest; 1 where nothing was updated."""
    lengths = Counter(len(w.micro_steps) for w in _closed(found))
    return max(lengths, key=lambda length: (lengths[length], length), default=1)
