"""Whether tensors hold what they held before, however they were written.

A write through `.data`, a NumPy view or a pointer changes no version. So on the CPU each tensor is read: sums over the
words of its rows, and over its columns, tell any change of a value and of its place. On other devices reading would
make the host wait. There a tensor counts as written when its version or its address changed, when its `.data` was
asked for, and as long as another tensor looks at its memory (data_reads.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync_fx.runtime.data_reads import DATA_READS, unread


_ROW = 1024  # words
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_WEIGHTS: dict[tuple[int, torch.dtype], torch.Tensor] = {}


class Snapshot:
    """What tensors held when it was taken."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        away = [t for t in tensors if t.device.type != "cpu"]
        if away:
            DATA_READS.watch(self, away)
        self._marks = [_mark(t) for t in tensors]

    def matches(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether they, or others in their places, hold the same."""
        return all(_mark(t) == mark for t, mark in zip(tensors, self._marks, strict=True))


def _mark(tensor: torch.Tensor) -> tuple[object, ...]:
    if tensor.device.type != "cpu":
        return unread(tensor)
    with torch.no_grad():
        return tuple(_sums(tensor.detach()))


def _sums(tensor: torch.Tensor) -> list[int]:
    flat = _in_memory(tensor)
    rows = flat.numel() // _ROW
    found = []
    if rows:
        body = flat[: rows * _ROW].view(rows, _ROW)
        words = _words(body)
        found = [_weighed(words.sum(1, dtype=torch.int64))]
        # By a product, where there is a fast one; a NaN is as good as any other number, by its bits.
        if body.dtype is torch.float32:
            columns = torch.mv(body, _weights(_ROW, torch.float32)).view(torch.int32)
            found.append(_weighed(columns.to(torch.int64)))
        else:
            found.append(_weighed(words.sum(0, dtype=torch.int64)))
    rest = flat[rows * _ROW :]
    if rest.numel():
        found.append(_weighed(rest.view(_WORDS[rest.itemsize]).to(torch.int64).view(-1)))
    return found


def _in_memory(tensor: torch.Tensor) -> torch.Tensor:
    """Its elements in one dimension, in the order in which they lie."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    if not tensor.is_contiguous():
        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(order).contiguous()  # no copy of a tensor that fills its memory
    return tensor.view(-1)


def _words(body: torch.Tensor) -> torch.Tensor:
    """As 64-bit words, which are summed fastest, where they lie so."""
    if (
        body.itemsize < 8
        and body.data_ptr() % 8 == 0
        and body.storage_offset() * body.itemsize % 8 == 0
    ):
        return body.view(torch.int64)
    return body.view(_WORDS[body.itemsize])


def _weighed(words: torch.Tensor) -> int:
    return int((words * _weights(words.numel(), torch.int64)).sum())


def _weights(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Odd numbers, or factors about 1, which no two places share."""
    if (count, dtype) not in _WEIGHTS:
        places = torch.arange(count, dtype=torch.int64)
        _WEIGHTS[count, dtype] = (
            places * 2 + 1 if dtype is torch.int64 else 1 + (places + 1).to(dtype) / (2 * count)
        )
    return _WEIGHTS[count, dtype]
