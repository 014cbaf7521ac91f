"""One rank's part of an optimizer's state, as `torch.distributed.checkpoint` saves and loads it: in boxes.

    a flat piece of a tensor of shape (4, 3):  . . x      a box of row 0,
                                               x x x      one of rows 1 and 2,
                                               x x x
                                               x . .      and one of row 3

So a checkpoint of pieces is one of whole tensors, each element written once, by the rank that has it: any number of
ranks loads it, with pieces or without.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


Box = tuple[tuple[int, ...], tuple[int, ...]]  # offsets, sizes


def boxes(shape: Sequence[int], start: int, end: int) -> Iterator[Box]:
    """The elements from start to end of a tensor that is flattened, as boxes of the tensor, in their order."""
    if start == end:
        return
    if len(shape) < 2:
        yield ((start,), (end - start,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    first, last = start // row, end // row
    if end <= (first + 1) * row and end - start < row:
        yield from _in_row(shape, first, start - first * row, end - first * row)
        return
    if start % row:
        yield from _in_row(shape, first, start % row, row)
        first += 1
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        yield (first, *zeros), (last - first, *shape[1:])
    if end % row:
        yield from _in_row(shape, last, 0, end % row)


def _in_row(shape: Sequence[int], number: int, start: int, end: int) -> Iterator[Box]:
    for offsets, sizes in boxes(shape[1:], start, end):
        yield (number, *offsets), (1, *sizes)


class Strides(tuple[int, ...]):
    """Of a flat tensor with so many elements."""

    elements: int

    def __new__(cls, elements: int) -> Strides:
        made = super().__new__(cls, (1,))
        made.elements = elements
        return made


class ShardTensor(torch.Tensor):
    """This rank's elements of a larger tensor, in the memory of the optimizer's state; empty where it has none."""

    whole: tuple[int, ...]
    start: int

    @classmethod
    def of(cls, piece: Tensor, whole: Sequence[int], start: int) -> ShardTensor:
        """piece: flat; its first element is number `start` of the whole tensor, flattened."""
        made = piece.detach().reshape(-1).as_subclass(cls)
        made.whole, made.start = tuple(whole), start
        return made

    def size(self, dim: int | None = None) -> Any:
        """Of the whole tensor: what a checkpoint compares."""
        return torch.Size(self.whole) if dim is None else self.whole[dim]

    # What `async_save` copies aside is made of these: `y = x.new_empty(...)`, then `y.set_(copied, ..., x.stride())`.

    def stride(self, dim: int | None = None) -> Any:
        """Of the elements that are here, with their number."""
        return Strides(self.elements().numel()) if dim is None else 1

    def new_empty(self, *size: Any, **options: Any) -> ShardTensor:
        """Without an element, whatever the size: that is the whole tensor's."""
        return self.elements().new_empty(0, **options).as_subclass(ShardTensor)

    def set_(self, source: Any, offset: int, size: Any, stride: Strides) -> ShardTensor:  # type: ignore[override]
        """Elements as they lie in other memory."""
        super().set_(source, offset, (stride.elements,), (1,))
        return self

    def __deepcopy__(self, memo: Any) -> ShardTensor:
        return ShardTensor.of(self.elements().clone(), self.whole, self.start)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return ShardTensor.of, (self.elements(), self.whole, self.start)

    def elements(self) -> Tensor:
        """As a plain tensor, flat."""
        return self.as_subclass(Tensor)

    def _chunks(self) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        flat, at = self.elements(), 0
        found = []
        for offsets, sizes in boxes(self.whole, self.start, self.start + flat.numel()):
            count = math.prod(sizes)
            chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
            found.append((chunk, flat[at : at + count].view(sizes)))
            at += count
        return found

    # torch.distributed.checkpoint asks tensors of any class for these three.

    def __create_write_items__(self, fqn: str, value: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties.create_from_tensor(part),
                    size=self.size(),
                ),
            )
            for chunk, part in self._chunks()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._chunks()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(part for chunk, part in self._chunks() if chunk.offsets == index.offset)
