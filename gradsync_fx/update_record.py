"""What `on_update` is told of an update: plain numbers, and what waits for ranks or a device only when it is asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist


@dataclass(slots=True, eq=False)
class WindowLosses:
    """sums: losses that count, their number, and the number of micro-steps that count, float64; of one rank, then of
    all. work: the exchange that is under way."""

    sums: torch.Tensor
    work: dist.Work | None = None

    def wait(self) -> None:
        """Until the exchange is over."""
        if self.work is not None:
            self.work.wait()
            self.work = None

    def read(self) -> tuple[float, float, int]:
        """Waits for the exchange."""
        self.wait()
        total, number, terms = self.sums.tolist()
        return total, number, round(terms)


@dataclass(frozen=True, slots=True, eq=False)
class UpdateRecord:
    """One update, as `on_update` is told of it on its rank.

    update: its number, from 1. micro_step: calls so far. slots: of the window, on all ranks together, with data or
    without. bytes_sent: of gradients that this rank gave to its reductions, as they go over the wire, and with
    `shard_optimizer` of new parameters, too. accumulate_seconds: of this rank's calls since the update before, but for
    the last one: boundary_seconds. exposed_seconds: of that, waiting for reductions; None where that is not measured
    (sums that are not reduced where they lie: another device or backend).

    >>> def show(record):
    ...     print(record.update, record.loss, record.gradient_norm)
    >>> step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2, on_update=show)
    """

    update: int
    micro_step: int
    slots: int
    bytes_sent: int
    accumulate_seconds: float
    boundary_seconds: float
    exposed_seconds: float | None
    _rates: tuple[Any, ...] = field(repr=False)
    _terms: int | None = field(repr=False)
    _losses: WindowLosses = field(repr=False)
    _norms: tuple[torch.Tensor, ...] = field(repr=False)

    @property
    def loss(self) -> float | None:
        """The mean over the window's micro-steps on all ranks of the scalar that the step returns: alone, first in a
        tuple, or under "loss". None for a step that returns none.

        Waits for the ranks, and for the device.
        """
        total, number, _ = self._losses.read()
        return total / number if number else None

    @property
    def terms(self) -> int:
        """Micro-steps that the update is made of, on all ranks.

        With `skip_nonfinite` it waits as `loss` does, and counts those since a window was loaded.
        """
        return self._losses.read()[2] if self._terms is None else self._terms

    @property
    def skipped(self) -> int:
        """Slots that gave it nothing: of `skip()`, and what was not finite. Waits as `terms` does."""
        return self.slots - self.terms

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """Of each parameter group of each optimizer, as the update used them. Waits for the device that holds one."""
        return tuple(map(float, self._rates))

    @property
    def gradient_norms(self) -> tuple[float, ...]:
        """What each `clip_grad_norm_` of the step gave: the norm before clipping. Waits for the device."""
        return tuple(float(norm) for norm in self._norms)

    @property
    def gradient_norm(self) -> float | None:
        """The same, of a step that clips once; None for others. Waits for the device."""
        return float(self._norms[0]) if len(self._norms) == 1 else None

    def scalars(self) -> dict[str, float]:
        """The numbers of it that a logger draws, by name: those that are there, one for each parameter group and norm.

        Waits for the ranks and the device.
        """
        found = {name: float(v) for name, v in self.as_dict().items() if isinstance(v, int | float)}
        del found["update"]
        for name, values in (
            ("learning_rate", self.learning_rates),
            ("gradient_norm", self.gradient_norms),
        ):
            numbered = {f"{name}_{i}": value for i, value in enumerate(values)}
            found |= {name: values[0]} if len(values) == 1 else numbered
        return found

    def as_dict(self) -> dict[str, Any]:
        """All of it by name, plain numbers: for a logger. Waits for the ranks and the device."""
        names = [n for n in self.__dataclass_fields__ if not n.startswith("_")]
        plain = {name: getattr(self, name) for name in names}
        asked = ("loss", "terms", "skipped", "learning_rates", "gradient_norms")
        return {**plain, **{name: getattr(self, name) for name in asked}}
