"""A bucket's running sums as views of one flat tensor, which is sent as it is: nothing is copied in or out.

| sum 0 | sum 1 | sum 2 |        on the CPU without gaps: on the wire it is what concatenating them gives, which a rank
                                 whose sums lie otherwise in memory does
| sum 0 |.| sum 1 |...| sum 2 |  elsewhere each starts on 16 elements: compilers take tensors for aligned, and clone in
                                 each call what is not. On the wire gaps are zeros, for all ranks
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync_fx.comm.shared_memory import Room


EVEN = 16  # elements: 16 bytes at least, whatever their dtype


def stretches(forms: Sequence[torch.Tensor]) -> list[int]:
    """How many elements each takes up in the flat tensor, the gap after it included."""
    counts = [form.numel() for form in forms]
    if forms[0].device.type != "cpu":
        counts[:-1] = [-(-count // EVEN) * EVEN for count in counts[:-1]]
    return counts


def allocate(
    forms: Sequence[torch.Tensor], dtype: torch.dtype, room: Room | None = None
) -> list[torch.Tensor]:
    """Zeros of these shapes in one stretch of memory: of this room, by default of the first one's device."""
    counts = stretches(forms)
    if room is None:
        flat = forms[0].new_zeros(sum(counts), dtype=dtype, requires_grad=False)
    else:
        flat = room.take(sum(counts), dtype)
    parts = flat.split(counts)
    return [piece_of(part, form) for part, form in zip(parts, forms, strict=True)]


def piece_of(stretch: torch.Tensor, form: torch.Tensor) -> torch.Tensor:
    """A stretch of a flat tensor as what lies in it."""
    return stretch[: form.numel()].view(form.shape)


def contiguous_view(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The flat tensor that these are the views of, in this order; None where they lie otherwise."""
    first = views[0]
    begin = start = end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for view, count in zip(views, stretches(views), strict=True):
        if view.untyped_storage().data_ptr() != storage or view.storage_offset() != start:
            return None
        if view.dtype is not first.dtype or not view.is_contiguous():
            return None
        start, end = start + count, start + view.numel()
    return first.as_strided((end - begin,), (1,), begin)
