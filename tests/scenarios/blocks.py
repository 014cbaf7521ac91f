"""Deep models of tests, and their layers as bodies: by the rule, tests' layers are too small for that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor, nn

from gradsync_fx.passes import blocks


@contextmanager
def every_layer() -> Iterator[None]:
    """Whatever repeats becomes a body."""
    few = mock.patch.object(blocks, "LEAST", 20)
    with mock.patch.object(blocks, "WORTH_A_CALL", 0.0), few:
        yield


class Layer(nn.Module):
    """A residual layer. scale: a constant in its code."""

    def __init__(self, width: int, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 12),
            nn.Linear(12, width),
        )
        self.scale, self.dropout = scale, nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(self.norm(x)) * self.scale)
        return x + self.dropout(self.down(hidden))


def deep(depth: int = 4, width: int = 8, dropout: float = 0.0) -> nn.Sequential:
    layers = (Layer(width, dropout=dropout) for _ in range(depth))
    return nn.Sequential(*layers, nn.Linear(width, 4))
