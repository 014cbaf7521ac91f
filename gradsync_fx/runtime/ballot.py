"""The decision between the halves of a boundary: whether its update counts, asked of the user on every rank.

reductions started -> each rank asks `commit` -> all tell each other -> update, or none

One rank's no is everybody's. What `commit` raises is a no for the others, and is raised on its own rank when all of
them have emptied the window.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from gradsync_fx.comm.rendezvous import Line
from gradsync_fx.errors import OptionError
from gradsync_fx.runtime.refusals import used_in_commit
from gradsync_fx.threads import OneAtATime


class Ballot:
    """One vote, of one end of a window. failure: what `commit` raised on this rank."""

    def __init__(self, commit: Callable[[], Any], line: Line) -> None:
        self._commit, self._line = commit, line
        self._counts: bool | None = None
        self.failure: BaseException | None = None

    @property
    def refused(self) -> bool:
        """Whether the ranks have voted, and one of them said no."""
        return self._counts is False

    def counts(self) -> bool:
        """Whether the update counts. Every rank asks, as often as it likes: the ranks vote once."""
        if self._counts is None:
            mine = self._mine()
            self._counts = all(row[0] > 0 for row in self._line.gather([float(mine)]))
        return self._counts

    def _mine(self) -> bool:
        try:
            said = self._commit()
            if said is None:
                raise OptionError(
                    "argument 'commit'",
                    seen=f"{getattr(self._commit, '__qualname__', self._commit)!s} returned None",
                    wanted="a callable that returns whether the update counts",
                    fix="return True or False from it",
                )
            return bool(said)
        except BaseException as failure:  # raised when the ranks have voted: they wait for this one
            self.failure = failure
            return False


def without_the_step(
    commit: Callable[[], Any], one_thread: OneAtATime, name: str
) -> Callable[[], Any]:
    """The user's decision, in which the step itself cannot be used."""

    @functools.wraps(commit)
    def alone() -> Any:
        with one_thread.shut(used_in_commit(name)):
            return commit()

    return alone
