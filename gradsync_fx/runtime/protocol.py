"""The interface of a step to the runtime, implemented by `CapturedStep` and by `EagerStep`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Objects, Setting
from gradsync_fx.runtime.accumulators import Accumulators, EarlySums
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.ending import Closed, Ending


class StepObjects(Objects, Protocol):
    """The user's objects that a step touches, by the names that the user knows."""

    @property
    def optimizers(self) -> tuple[Optimizer, ...]: ...
    @property
    def batch_norms(self) -> tuple[str, ...]: ...


class StepProtocol(Protocol):
    """A step as windows see it, however its calls run.

    The executor counts, lets the ranks meet, and asks a step for the rest: what it is (the properties), where it stands
    (`layout_for`, `certain`), and to end a window (`close`).
    """

    @property
    def objects(self) -> StepObjects: ...
    @property
    def setting(self) -> Setting:
        """Its ranks, and what goes between them."""

    @property
    def collectives(self) -> OwnCollectives:
        """Those of the step's own code, as far as they are known."""

    @property
    def updates(self) -> bool:
        """Whether it is known how it changes a parameter: without that, a call can only accumulate."""

    @property
    def can_close(self) -> bool:
        """Whether it can take part in the end of a window without data."""

    @property
    def weighs(self) -> bool:
        """Whether the weights of a window are known only when its micro-steps have run."""

    @property
    def early_sums(self) -> EarlySums | None:
        """Where terms of the open window wait for linear work (prologue.py); None where all are in accumulators."""

    @property
    def settled(self) -> bool:
        """Whether it knows what it shares with other ranks in memory, or has nothing to share."""

    @property
    def reduced(self) -> frozenset[str]:
        """Parameters whose gradients are reduced over the ranks of the window, and so stay the same on all of them."""

    @property
    def speaks_in_every_call(self) -> bool:
        """Whether also an accumulate call meets the other ranks: it has collectives anyway, of ours or of its own."""

    @property
    def waited(self) -> tuple[int, float]:
        """How often calls waited for a reduction so far, and the seconds of that, as far as it is measured."""

    @property
    def norms(self) -> Sequence[torch.Tensor]:
        """What the clippings of the latest update gave; nothing where nobody asks."""

    def take_weight(self) -> torch.Tensor | None:
        """Once after each call: what it weighs, 0 where its term does not count; None where each term counts."""

    def bytes_sent(self, closing: Collection[int]) -> int:
        """Of what this rank gives to the reductions, and gathers, of one window of these parts."""

    def layout_for(self, in_window: Collection[str]) -> int:
        """A number for the buckets that hold the window's gradients; see `Position`."""

    def certain(self, in_window: Collection[str], closing: Collection[int]) -> bool:
        """Whether each gradient that closes has a term that counts, whatever the weight of the call that comes.

        closing: no parts where the other ranks say which.
        """

    def updates_told(self, parts: Collection[int]) -> list[str]:
        """What has to be alike on all ranks of the updates of these parts, in words; nothing where none is divided."""

    def masks(self, accumulators: Accumulators, closing: frozenset[int], summed: int) -> bool:
        """Whether it can close these parts without knowing yet whether any of their `summed` micro-steps counted."""

    def close(self, ending: Ending, args: list[Any] | None) -> Closed:
        """Ends the window: reduces and updates. args: of the call that ends it; None without data."""

    def participate(self, accumulators: Accumulators, integrity: Integrity) -> None:
        """Takes part, without data, in the reductions of the other ranks' accumulate call."""

    def change_steps(self, options: Options) -> None:
        """Another window length. Raises where the step cannot have it."""
