"""What a step does with its gradients between `backward` and its end, remembered: a window that closes without data
does it again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer


@dataclass(frozen=True, slots=True)
class Deed(ABC):
    """One such call. reads: the optimizers (by number) whose gradients it looks at."""

    reads: tuple[int, ...]

    @abstractmethod
    def repeat(self) -> None:
        """Does it again."""


@dataclass(frozen=True, slots=True)
class Clip(Deed):
    """`clip_grad_norm_` or `clip_grad_value_`, with its arguments."""

    function: Any
    parameters: tuple[torch.Tensor, ...]
    arguments: tuple[tuple[str, Any], ...]

    def repeat(self) -> None:
        self.function(list(self.parameters), **dict(self.arguments))


@dataclass(frozen=True, slots=True)
class Update(Deed):
    """`optimizer.step(...)`."""

    optimizer: Optimizer
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()

    def repeat(self) -> None:
        self.optimizer.step(*self.args, **dict(self.kwargs))


@dataclass(frozen=True, slots=True)
class Schedule(Deed):
    """`scheduler.step(...)`."""

    scheduler: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def repeat(self) -> None:
        self.scheduler.step(*self.args, **dict(self.kwargs))
