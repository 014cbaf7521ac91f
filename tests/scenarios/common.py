"""What all scenarios need: a model as it is or wrapped, and data of its own for each rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tests.reference import Window, regression


Make = Callable[[nn.Module], Optimizer]


def wrapped(model: nn.Module, wrap: str, **options: Any) -> nn.Module:
    return model if wrap == "plain" else DistributedDataParallel(model, **options)


def data_of(rank: int, windows: int, k: int) -> list[Window]:
    return regression(windows, k, seed=10 + rank)
