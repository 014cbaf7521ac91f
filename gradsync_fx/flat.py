"""A bucket's running sums as views of one flat tensor, which travels as it is: nothing is joined, nothing copied out.

| sum 0 |.| sum 1    |..| sum 2 |        each starts at a multiple of 64 bytes; the gaps are zero, and stay so
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


_ALIGNMENT = 64  # bytes: a cache line, and the widest vector registers


def allocate(forms: Sequence[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """Zeros of these shapes, on the first one's device, in one stretch of memory."""
    starts = _starts([form.numel() for form in forms], dtype)
    end = starts[-1] + forms[-1].numel()
    flat = torch.zeros(end, dtype=dtype, device=forms[0].device)
    return [
        flat[start : start + form.numel()].view(form.shape)
        for start, form in zip(starts, forms, strict=True)
    ]


def joined(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The flat tensor that these are the views of, in this order and all of them; None where they lie otherwise."""
    first = views[0]
    begin, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    starts = _starts([view.numel() for view in views], first.dtype)
    for start, view in zip(starts, views, strict=True):
        if view.storage_offset() != begin + start or view.dtype is not first.dtype:
            return None
        if view.untyped_storage().data_ptr() != storage or not view.is_contiguous():
            return None
    return first.as_strided((starts[-1] + views[-1].numel(),), (1,), begin)


def _starts(counts: Sequence[int], dtype: torch.dtype) -> list[int]:
    """Where each of tensors with so many elements starts."""
    unit = math.lcm(_ALIGNMENT, dtype.itemsize) // dtype.itemsize
    starts, end = [], 0
    for count in counts:
        start = -(-end // unit) * unit
        starts.append(start)
        end = start + count
    return starts
