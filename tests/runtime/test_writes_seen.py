"""Whether tensors hold what they held: writes of every kind are told, and nothing else is."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gradsync_fx.runtime.data_reads import DATA_READS, unread
from gradsync_fx.runtime.writes_seen import Snapshot


SHAPES = [(), (3,), (7, 5), (1024,), (40, 70), (3000,)]
FLOATING = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
DTYPES = [*FLOATING, torch.int64, torch.uint8, torch.bool, torch.complex64]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape) * 50).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_each_element_counts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    value = made(shape, dtype)
    snapshot = Snapshot([value])
    assert snapshot.matches([value])
    assert snapshot.matches([value.clone()])
    flat = value.view(-1)
    for i in {0, flat.numel() // 2, flat.numel() - 1}:
        before = flat[i].clone()
        flat[i] = not before if dtype is torch.bool else before + 1
        assert not snapshot.matches([value]), i
        flat[i] = before
        assert snapshot.matches([value])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    rows=st.integers(1, 60), columns=st.integers(2, 90), a=st.integers(0, 10**6), b=st.integers(0, 10**6)
)  # fmt: skip
def test_each_place_counts(rows: int, columns: int, a: int, b: int) -> None:
    source = torch.Generator().manual_seed(rows * columns)
    value = torch.randn(rows, columns, generator=source)
    flat, count = value.view(-1), value.numel()
    i, j = a % count, b % count
    snapshot = Snapshot([value])
    flat[i], flat[j] = flat[j].clone(), flat[i].clone()
    assert snapshot.matches([value]) is (i == j)


def test_the_smallest_change_counts() -> None:
    value = torch.randn(2000, 3)
    snapshot = Snapshot([value])
    value[1000, 1] = torch.nextafter(value[1000, 1], torch.tensor(torch.inf))
    assert not snapshot.matches([value])


def test_numbers_that_are_none_are_numbers_too() -> None:
    value = torch.randn(2048)
    value[3] = torch.nan
    snapshot = Snapshot([value])
    assert snapshot.matches([value])
    value[4] = torch.nan
    assert not snapshot.matches([value])


@pytest.mark.parametrize(
    "form", [lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:, 1:], lambda t: t.expand(2, *t.shape)]
)  # fmt: skip
def test_forms_of_all_kinds(form: Callable[[Tensor], Tensor]) -> None:
    base = torch.randn(70, 60)
    snapshot = Snapshot([form(base)])
    assert snapshot.matches([form(base)])
    base[40, 30] += 1
    assert not snapshot.matches([form(base)])


class Watcher:
    """Somebody who watches."""


def test_without_reading_values() -> None:
    """As tensors on other devices are watched."""
    watcher, value = Watcher(), torch.nn.Parameter(torch.randn(3))
    DATA_READS.watch(watcher, [value])
    mark = unread(value)
    assert unread(value) == mark
    with torch.no_grad():
        value.mul_(2)
    assert unread(value) != mark
    mark = unread(value)
    value.data.mul_(2)
    assert unread(value) != mark
    mark = unread(value)
    other = value.detach()
    assert unread(value) != unread(value), "it may be written at any time"
    del other
    assert unread(value) == mark
    value.data = torch.zeros(3)
    assert unread(value) != mark


def test_torchs_own_attribute_is_put_back() -> None:
    assert "data" not in torch.Tensor.__dict__
    watcher, other = Watcher(), Watcher()
    value = torch.zeros(3)
    DATA_READS.watch(watcher, [value])
    DATA_READS.watch(other, [value])
    assert "data" in torch.Tensor.__dict__
    assert torch.ones(2).data.equal(torch.ones(2))
    del watcher
    gc.collect()
    assert "data" in torch.Tensor.__dict__
    del other
    gc.collect()
    assert "data" not in torch.Tensor.__dict__
