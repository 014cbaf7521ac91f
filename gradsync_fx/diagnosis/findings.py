"""The result of `diagnose`: findings and the windows that were seen, with text and JSON as views."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass

from gradsync_fx.wording import number_of


VERSION = 1
WIDTH = 100  # columns of the text
ERROR, WARNING, NOTE = "error", "warning", "note"
NOT_JUDGED = ("closure", "optimizers-apart")


@dataclass(frozen=True, slots=True)
class Finding:
    """One mistake.

    code: its stable name. severity: "error" (the numbers are wrong, on several ranks at least), "warning" (wasteful, or
    probably not meant), "note".
    line: `file:line` of the user's code. seen, wanted, fix: as in the errors of this package.
    """

    code: str
    severity: str
    line: str
    seen: str
    wanted: str
    fix: str

    def __str__(self) -> str:
        parts = {"at": self.line, "seen": self.seen, "wanted": self.wanted, "what to do": self.fix}
        told = (_paragraph(f"{name}: {text}") for name, text in parts.items())
        return "\n".join((f"{self.severity} {self.code}", *told))


@dataclass(frozen=True, slots=True)
class WindowSeen:
    """One window. reduced: micro-steps in which DDP reduced. collectives: started in backward, None if not counted.

    bytes: of gradients that one rank put into them. updated: an optimizer's step closed it.
    """

    micro_steps: int
    reduced: int
    collectives: int | None
    bytes: int
    updated: bool


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What `diagnose` found: `print(diagnosis)` for a text. micro_steps: as asked for.

    gradient_bytes: of one reduction of all gradients, on one rank.
    """

    findings: tuple[Finding, ...]
    windows: tuple[WindowSeen, ...]
    micro_steps: int
    world_size: int
    gradient_bytes: int

    @property
    def ok(self) -> bool:
        """Whether nothing was found but notes."""
        return all(f.severity == NOTE for f in self.findings)

    @property
    def judged(self) -> bool:
        """Whether the loop is of a kind that can be judged; else a note says why not."""
        return not any(f.code in NOT_JUDGED for f in self.findings)

    def __str__(self) -> str:
        lines = [str(f) for f in self.findings]
        if self.ok:
            lines.insert(0, "the loop looks right" if self.judged else "the loop was not judged")
        return "\n".join((*lines, self._seen()))

    def _seen(self) -> str:
        closed = [w for w in self.windows if w.updated]
        text = (
            f"seen: {number_of(sum(w.micro_steps for w in self.windows), 'micro-step')}, "
            f"{number_of(len(closed), 'update')} (micro_steps={self.micro_steps}, world size {self.world_size})"
        )
        if closed:
            text += (
                f"\n      micro-steps per update: {_spread([w.micro_steps for w in closed])}"
                f"\n      reducing micro-steps per update: {_spread([w.reduced for w in closed])}"
                f"\n      gradient bytes reduced per update and rank: {_spread([w.bytes for w in closed])}"
            )
        return text

    def to_json(self) -> str:
        """All of it as JSON; its `version` changes when a field changes its meaning."""
        return json.dumps(
            {"version": VERSION, "ok": self.ok, "judged": self.judged, **asdict(self)}, indent=1
        )


def _paragraph(text: str) -> str:
    """Text for a terminal; names and paths stay whole."""
    return textwrap.fill(
        text,
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _spread(numbers: list[int]) -> str:
    """One number where all are equal, else each of them."""
    if len(set(numbers)) == 1:
        return f"{numbers[0]:,}"
    shown = ", ".join(f"{n:,}" for n in numbers[:8])
    return shown + (", ..." if len(numbers) > 8 else "")
