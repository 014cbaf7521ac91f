"""Names among which two options choose; the help of the command line lists them, and so they stand without torch."""

from __future__ import annotations

from typing import Literal, get_args


ReductionKind = Literal["mean", "sum", "weighted"]
Broadcasts = Literal["window_start", "never", "every"]
REDUCTIONS: tuple[str, ...] = get_args(ReductionKind)
BROADCASTS: tuple[str, ...] = get_args(Broadcasts)
