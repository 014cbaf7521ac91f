"""The counter of a window: a pure value with one owner, the executor."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class WindowState:
    """Where a rank stands. 1-based: call n closes a window when `pending` reaches k with it.

    micro_step: calls so far. optimizer_step: updates so far. pending: micro-steps in the open window, skipped ones
    included. summed: those among them that added something.
    """

    micro_step: int = 0
    optimizer_step: int = 0
    pending: int = 0
    summed: int = 0

    def closes(self, k: int) -> bool:
        """Whether the next call is the boundary of a window of k micro-steps."""
        return self.pending + 1 >= k

    def accumulated(self) -> WindowState:
        """After a call that added its gradient to the open window."""
        return replace(
            self, micro_step=self.micro_step + 1, pending=self.pending + 1, summed=self.summed + 1
        )

    def skipped(self) -> WindowState:
        """After a slot without data."""
        return replace(self, micro_step=self.micro_step + 1, pending=self.pending + 1)

    def closed(self, *, updated: bool) -> WindowState:
        """After the window ended; `updated` tells whether the optimizer stepped."""
        return replace(self, optimizer_step=self.optimizer_step + updated, pending=0, summed=0)
