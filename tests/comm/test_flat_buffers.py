"""One stretch of memory below the sums of a bucket, found again from the sums."""

from __future__ import annotations

import torch

from gradsync_fx.comm.flat_buffers import allocate, contiguous_view


def test_sums_of_one_stretch_are_found_contiguous_view() -> None:
    sums = allocate([torch.empty(3, 5), torch.empty(()), torch.empty(7)], torch.float64)
    assert [total.shape for total in sums] == [(3, 5), (), (7,)]
    for i, total in enumerate(sums):
        total.fill_(i)
    flat = contiguous_view(sums)
    assert flat is not None
    assert flat.tolist() == [0] * 15 + [1] + [2] * 7
    flat.add_(1)
    assert sums[1].item() == 2


def test_a_part_of_a_stretch() -> None:
    sums = allocate([torch.empty(2), torch.empty(3), torch.empty(4)], torch.float32)
    flat = contiguous_view(sums[1:])
    assert flat is not None
    assert flat.data_ptr() == sums[1].data_ptr()
    assert flat.shape == (7,)


def test_what_lies_otherwise_is_not_contiguous_view() -> None:
    a, b, c = allocate([torch.empty(2, 2), torch.empty(4), torch.empty(4)], torch.float32)
    for other in ([b, a], [a, c], [a.t(), b], [a, torch.zeros(4)], [a, b.view(torch.int32)]):
        assert contiguous_view(other) is None


def test_elsewhere_than_on_the_cpu_each_sum_starts_even() -> None:
    forms = [torch.empty(n, device="meta") for n in (3, 32, 17, 5)]
    sums = allocate(forms, torch.bfloat16)
    assert [total.storage_offset() for total in sums] == [0, 16, 48, 80]
    assert [total.shape for total in sums] == [form.shape for form in forms]
    flat = contiguous_view(sums)
    assert flat is not None
    assert flat.shape == (85,)
    assert contiguous_view(sums[1:3]) is not None
    assert contiguous_view(sums[::2]) is None
