"""Which elements of some tensors are whose, as an op of a program is told it: by numbers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Cuts:
    """Tensors that are divided among ranks. Of tensor i rank r has the flattened elements from bounds[i][r] to
    bounds[i][r + 1]. rank: of this process.
    """

    bounds: tuple[tuple[int, ...], ...]
    rank: int

    @classmethod
    def of(cls, numbers: Sequence[int], count: int, rank: int) -> Cuts:
        """Of `count` tensors, from the bounds of all of them, one behind the other."""
        each = len(numbers) // count
        rows = [tuple(numbers[i * each : (i + 1) * each]) for i in range(count)]
        return cls(tuple(rows), rank)

    @property
    def world(self) -> int:
        return len(self.bounds[0]) - 1

    def size(self, i: int, rank: int) -> int:
        return self.bounds[i][rank + 1] - self.bounds[i][rank]

    def sizes(self, rank: int) -> list[int]:
        """Of a rank's pieces."""
        return [self.size(i, rank) for i in range(len(self.bounds))]

    def totals(self) -> list[int]:
        """How many elements each rank has."""
        return [sum(self.sizes(rank)) for rank in range(self.world)]

    def pieces(self, tensors: Sequence[torch.Tensor], rank: int) -> list[torch.Tensor]:
        """Of contiguous tensors the pieces of a rank, as flat views."""
        return [
            tensor.view(-1)[bounds[rank] : bounds[rank + 1]]
            for tensor, bounds in zip(tensors, self.bounds, strict=True)
        ]
