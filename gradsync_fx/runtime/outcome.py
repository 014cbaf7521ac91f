"""Whether a window counted, where only the device knows yet: the host goes on, and learns it when it is there.

    boundary -> Outcome -> more calls ... -> the next meeting of ranks, or somebody asks for a counter -> settled

A program that masks an empty window (passes/mask.py) made no update where nothing counted, and said so in its last
output. The host has counted on by then: the numbers that it keeps of an update (Adam's count of steps) were taken as
if there had been one, and are put back if there was none.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from gradsync_fx.comm.host_copy import HostCopy


@dataclass(frozen=True, slots=True)
class Outcome:
    """weight: of the window, over all ranks. put_back: the numbers that the host counted with the update."""

    weight: HostCopy
    put_back: Callable[[], None]

    def counted(self) -> bool:
        """Waits for the program that closed the window, and for nothing behind it. Puts numbers back for no update."""
        (weight,) = self.weight.values()
        if not weight > 0:
            self.put_back()
        return bool(weight > 0)


class SettledStates:
    """Optimizers whose states are settled before somebody saves or loads them."""

    def __init__(self) -> None:
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def watch(self, optimizers: Iterable[Optimizer], settle: Callable[[], None]) -> None:
        """From now on `settle`, a method, comes before `state_dict` and `load_state_dict`, as long as its object is."""
        asked = weakref.WeakMethod(settle)

        def before(*_: Any) -> None:
            found = asked()
            if found is not None:
                found()

        for optimizer in optimizers:
            if optimizer not in self._known:
                self._known.add(optimizer)
                optimizer.register_state_dict_pre_hook(before)
                optimizer.register_load_state_dict_pre_hook(before)
