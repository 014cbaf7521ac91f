"""The journal of a step, as data: what each pass did to a program and how long it took, and what the device records of
it. Read by the report."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of the journal: what a pass did to a program, and how long it took."""

    program: str
    name: str
    milliseconds: float
    nodes_before: int
    nodes_after: int


@dataclass(frozen=True, slots=True)
class Recording:
    """What a CUDA graph can hold of a program, as mode="reduce-overhead" records it.

    asked: whether it is recorded where it can be. never: why nothing of it can be; empty where something can. apart:
    what is left out, each with its reason: the recording is made in the parts between these. parts: how many Inductor
    made; 0 where it was not asked, or made none.
    """

    program: str
    asked: bool
    never: str = ""
    apart: tuple[str, ...] = ()
    parts: int = 0

    @property
    def verdict(self) -> str:
        """ "whole", "in parts" or "no"."""
        return "no" if self.never else "in parts" if self.apart else "whole"

    @property
    def why(self) -> tuple[str, ...]:
        """What is left out, or why all of it is."""
        return (self.never,) if self.never else self.apart

    def __str__(self) -> str:
        if self.never:
            return f"not recorded: {self.never}"
        done = "recorded" if self.asked else "can be recorded"
        return f"{done} but for {'; '.join(self.apart)}" if self.apart else done


@dataclass(frozen=True, slots=True)
class Exchanged:
    """Of updates that are shared out, what a compiled program exchanges in memory where that is reached: running sums
    and new parameters, by name.
    """

    sums: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(slots=True)
class Journal:
    """One entry for each pass that ran, in order. recordings, exchanged: by the name of the program."""

    entries: list[Entry] = field(default_factory=list)
    recordings: dict[str, Recording] = field(default_factory=dict)
    exchanged: dict[str, Exchanged] = field(default_factory=dict)
