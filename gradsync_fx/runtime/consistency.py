"""Tracks what an interrupted call may have left half done, so that no later call builds on it.

A call says what it is about to do before it does it, and that it is over when nothing can go wrong any more:

    (whole) -> MEETING, where there are other ranks -> SUMS or UPDATE -> (whole)

What still stands there when the next call comes was cut off, at whatever instruction: by an interrupt, by a rank that
went away, by an error in a program or in the user's own code after the update.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from gradsync_fx.errors import (
    RankLostError,
    RanksDisagreeError,
    ReplicaMismatchError,
    WindowError,
)


MEETING = 1  # the other ranks expect this one in collectives
SUMS = 2  # running sums, and module buffers with them, are being written
UPDATE = 4  # parameters and optimizer state, too


class Integrity:
    """Three marks, as bits: several may stand at once."""

    def __init__(self) -> None:
        self._open = 0

    @contextmanager
    def among_ranks(self, *, alone: bool = False) -> Iterator[None]:
        """The ranks tell each other what has to agree. Where it does, they go on together until the call is `over`.

        Where it does not, all of them see that and raise: none waits for another. alone: there are no others.
        """
        if not alone:
            self._open |= MEETING
        try:
            yield
        except (RanksDisagreeError, ReplicaMismatchError) as error:
            if not isinstance(error, RankLostError):
                self._open &= ~MEETING
            raise

    def writes(self, *, updates: bool) -> None:
        """A program, or what stands in for one, is about to run."""
        self._open |= UPDATE | SUMS if updates else SUMS

    @contextmanager
    def summing(self) -> Iterator[None]:
        """Running sums are written between or ahead of programs; what was marked before stays marked."""
        before, self._open = self._open, self._open | SUMS
        yield
        self._open = before

    def spared(self) -> None:
        """It failed before its first write."""
        self._open &= MEETING

    def over(self) -> None:
        """The counters agree with the tensors, and no other rank waits for this one."""
        self._open = 0

    def check(self, what: str, *, allowed: int = 0) -> None:
        """Raises `WindowError` for `what`, unless all marks that stand are among those allowed."""
        if self._open & ~allowed:
            raise _void(what, self._open)


def _void(what: str, found: int) -> WindowError:
    if found & MEETING:
        seen = "an earlier call was cut off between the ranks: the others may still wait for this one, or are gone"
        if found & UPDATE:
            seen += "; parameters and optimizer state may be half written"
        elif found & SUMS:
            seen += "; the running sums may be half written"
        fix = "end all ranks, and start them anew from the last saved state"
    elif found & UPDATE:
        seen = (
            "an earlier call was cut off while it updated: the window is void, and parameters and optimizer state may "
            "be half written"
        )
        fix = "load a saved state into the model, the optimizer and the step"
    else:
        seen = "an earlier call was cut off while it added to the running sums: the window is void"
        fix = "drop it with step.discard() (on every rank), or load a saved state"
    return WindowError(what, seen=seen, wanted="a window of whole micro-steps", fix=fix)
