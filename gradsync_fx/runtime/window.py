"""The counter of a window: a pure value with one owner, the executor."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace


NONE: frozenset[int] = frozenset()  # no part of a window


@dataclass(frozen=True, slots=True)
class Part:
    """Micro-steps that one part of the window has pending (skipped ones too), and those that added something."""

    pending: int = 0
    summed: int = 0


@dataclass(frozen=True, slots=True)
class WindowState:
    """Where a rank stands. 1-based: call n closes a part when its `pending` reaches k with it.

    micro_step: calls so far. optimizer_step: updates so far. parts: one, or one for each optimizer with its own k.
    """

    micro_step: int = 0
    optimizer_step: int = 0
    parts: tuple[Part, ...] = (Part(),)

    @classmethod
    def fresh(cls, parts: int) -> WindowState:
        """A window in which nothing has happened."""
        return cls(parts=(Part(),) * parts)

    @property
    def pending(self) -> int:
        """Micro-steps in the open window: of the part that has most."""
        return max(p.pending for p in self.parts)

    def closing(self, steps: Collection[int]) -> frozenset[int]:
        """The parts that the next call closes, with windows of `steps` micro-steps."""
        return frozenset(
            i for i, (p, k) in enumerate(zip(self.parts, steps, strict=True)) if p.pending + 1 >= k
        )

    def called(self, *, summed: bool) -> WindowState:
        """After a call, or (with summed=False) after a slot without data."""
        return replace(
            self,
            micro_step=self.micro_step + 1,
            parts=tuple(Part(p.pending + 1, p.summed + summed) for p in self.parts),
        )

    def closed(self, parts: Collection[int]) -> WindowState:
        """After these parts ended."""
        return replace(
            self, parts=tuple(Part() if i in parts else p for i, p in enumerate(self.parts))
        )

    def updated(self) -> WindowState:
        """After a call in which an optimizer stepped."""
        return replace(self, optimizer_step=self.optimizer_step + 1)
