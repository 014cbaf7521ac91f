"""A bucket's running sums as views of one flat tensor, which is sent as it is: nothing is copied in or out.

| sum 0 | sum 1 | sum 2 |        without gaps: on the wire it is what concatenating them gives, which a rank whose
                                 sums lie otherwise in memory does
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gradsync_fx.comm.shared_memory import Room


def allocate(
    forms: Sequence[torch.Tensor], dtype: torch.dtype, room: Room | None = None
) -> list[torch.Tensor]:
    """Zeros of these shapes in one stretch of memory: of this room, by default of the first one's device."""
    counts = [form.numel() for form in forms]
    if room is None:
        flat = forms[0].new_zeros(sum(counts), dtype=dtype, requires_grad=False)
    else:
        flat = room.take(sum(counts), dtype)
    parts = flat.split(counts)
    return [part.view(form.shape) for part, form in zip(parts, forms, strict=True)]


def contiguous_view(views: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """The flat tensor that these are the views of, in this order; None where they lie otherwise."""
    first = views[0]
    begin = end = first.storage_offset()
    storage = first.untyped_storage().data_ptr()
    for view in views:
        if view.untyped_storage().data_ptr() != storage or view.storage_offset() != end:
            return None
        if view.dtype is not first.dtype or not view.is_contiguous():
            return None
        end += view.numel()
    return first.as_strided((end - begin,), (1,), begin)
