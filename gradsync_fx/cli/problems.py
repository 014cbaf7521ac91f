"""`Problem`, the command line's error: an exit code, culprit, seen, wanted, and what to do."""

from __future__ import annotations

from collections.abc import Callable

from rich.text import Text

from gradsync_fx.errors import GradSyncError


REFUSED, USAGE, RAISED, UNWRITABLE = 1, 2, 3, 4
MEANINGS = {
    0: "ok",
    REFUSED: "the step is refused, nothing is converted, or the doctor or diagnose --stop found a failure",
    USAGE: "wrong use: bad arguments, file or factory not found",
    RAISED: "the factory or the step raised, hung, or returned the wrong thing",
    UNWRITABLE: "an output cannot be written",
}


class Afterwards(BaseException):
    """What a command leaves to be done when the parser of arguments is out of the way."""

    def __init__(self, run: Callable[[], None]) -> None:
        super().__init__()
        self.run = run


class Problem(Exception):
    """An error for stderr. trace: its traceback as text, "" for none. Can be pickled."""

    def __init__(
        self, code: int, culprit: str, seen: str, wanted: str = "", fix: str = "", trace: str = ""
    ) -> None:
        super().__init__(code, culprit, seen, wanted, fix, trace)
        self.code, self.culprit, self.seen = code, culprit, seen
        self.wanted, self.fix, self.trace = wanted, fix, trace

    @classmethod
    def of(cls, code: int, error: GradSyncError, trace: str = "") -> Problem:
        """An error of the library, told in its own words."""
        return cls(code, error.culprit, error.seen, error.wanted, error.fix, trace)

    def text(self, *, traceback: bool) -> Text:
        """For a `rich` console; without a newline at its end."""
        text = Text()
        if traceback and self.trace:
            text.append(printable(self.trace).rstrip() + "\n", style="dim")
        text.append("error: ", style="bold red")
        text.append(printable(self.culprit), style="bold")
        text.append(f": {printable(self.seen)}")
        if self.wanted:
            text.append("\n  wanted: ", style="cyan")
            text.append(printable(self.wanted))
        if self.fix:
            text.append("\n  what to do: ", style="cyan")
            text.append(printable(self.fix))
        if self.trace and not traceback:
            text.append("\n  (--traceback shows where)", style="dim")
        return text


def printable(text: str) -> str:
    """Text with control characters escaped: a name cannot move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() or c in "\n\t" else repr(c)[1:-1] for c in text)
