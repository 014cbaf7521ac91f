"""Buckets at run time, of one rank: found again by their sums, and gone with the step that owns them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator, Sequence
from unittest import mock

import pytest
import torch
from torch import Tensor

from gradsync_fx.comm import flat_bucket
from gradsync_fx.comm.flat_bucket import FlatBucket, FlatBuckets, buckets_in_use
from gradsync_fx.comm.flat_buffers import allocate
from gradsync_fx.comm.inplace_all_reduce import START_SUMS, WAIT_SUMS


FORMS = [torch.empty(2, 3), torch.empty(()), torch.empty(5)]
OTHERS = [torch.empty(4), torch.empty(0)]
F32 = torch.float32


@pytest.fixture
def sent() -> Iterator[list[Tensor]]:
    """What goes over a wire between two ranks that hold the same: it comes back doubled, when it is waited for."""
    found: list[Tensor] = []

    def send(flat: Tensor, *_: object) -> None:
        found.append(flat)

    def wait(flat: Tensor) -> Tensor:
        return flat.mul_(2)

    with (
        mock.patch.object(flat_bucket, "ALL_REDUCE_IN_PLACE", send),
        mock.patch.object(flat_bucket, "WAIT", wait),
    ):
        yield found


def filled(forms: Sequence[Tensor], value: float = 1.0) -> list[Tensor]:
    sums = allocate(forms, F32)
    for total in sums:
        total.fill_(value)
    return sums


def reduce(sums: list[Tensor], wire: torch.dtype = F32) -> None:
    START_SUMS(sums, "sum", "group", wire)
    WAIT_SUMS(sums)


def all_are(value: float, *sums: Sequence[Tensor]) -> bool:
    return all(bool((total == value).all()) for bucket in sums for total in bucket)


def test_a_bucket_is_sent_from_where_it_lies(sent: list[Tensor]) -> None:
    sums = filled(FORMS)
    with FlatBuckets([sums]).in_use():
        reduce(sums)
    assert [flat.data_ptr() for flat in sent] == [sums[0].data_ptr()]
    assert all_are(2, sums)


def test_profiles_name_buckets(sent: list[Tensor]) -> None:
    """By the parameter whose sum lies first; and they cost no name where nobody looks."""
    sums = filled(FORMS)
    buckets = FlatBuckets([sums], {sums[0].data_ptr(): "body.weight"})
    with buckets.in_use(), torch.profiler.profile() as profiler:
        reduce(sums)
    names = {event.name for event in profiler.events()}
    wanted = "gradsync_fx bucket of body.weight (3 sums)"
    assert {f"{wanted} starts", f"{wanted} is waited for"} <= names
    assert buckets.waited[0] == 1


@pytest.mark.parametrize("wire", [F32, torch.bfloat16])
@pytest.mark.parametrize("apart", [False, True])
def test_a_bucket_that_is_sent_as_a_copy(
    sent: list[Tensor], wire: torch.dtype, apart: bool
) -> None:
    sums = [torch.ones(form.shape) for form in FORMS] if apart else filled(FORMS)
    with FlatBuckets([sums]).in_use():
        reduce(sums, wire)
    assert [flat.dtype for flat in sent] == [wire]
    assert all_are(2, sums)


def test_sums_that_belong_to_no_bucket_of_the_step(sent: list[Tensor]) -> None:
    """A bucket with a running weight: it is one until it is waited for."""
    sums, weight = filled(FORMS), torch.ones((), dtype=torch.float64)
    buckets = FlatBuckets([sums])
    with buckets.in_use():
        START_SUMS([*sums, weight], "sum", "group", F32)
        WAIT_SUMS([*sums, weight])
        assert buckets._started == {}
    assert all_are(2, sums, [weight])


def test_buckets_under_way_together(sent: list[Tensor]) -> None:
    """Waited for in another order; two of them without elements lie at the same address, nowhere."""
    one, two = filled(FORMS), filled(OTHERS)
    empty, other = [torch.empty(0)], [torch.empty(0)]
    with FlatBuckets([one, two, empty, other]).in_use():
        for sums in (one, empty, two):
            START_SUMS(sums, "sum", "group", F32)
        WAIT_SUMS(two)
        assert all_are(1, one)
        WAIT_SUMS(one)
        WAIT_SUMS(empty)
        START_SUMS(other, "sum", "group", F32)
        WAIT_SUMS(other)
    assert all_are(2, one, two)


def test_two_steps_at_once(sent: list[Tensor]) -> None:
    """A step that another one calls: each has its own buckets."""
    outer, inner = filled(FORMS), filled(FORMS, 3)
    step, other = FlatBuckets([outer]), FlatBuckets([inner])
    with step.in_use():
        START_SUMS(outer, "sum", "group", F32)
        with other.in_use():
            reduce(inner)
            assert buckets_in_use() is other
        WAIT_SUMS(outer)
    assert all_are(2, outer)
    assert all_are(6, inner)


def test_what_a_program_started_that_was_cut_off_is_forgotten(sent: list[Tensor]) -> None:
    sums = filled(FORMS)
    buckets = FlatBuckets([sums])

    def cut_off() -> None:
        with buckets.in_use():
            START_SUMS(sums, "sum", "group", F32)
            raise ValueError("cut off")

    with pytest.raises(ValueError, match="cut off"):
        cut_off()
    assert buckets._started == {}
    with buckets.in_use():
        reduce(sums)
    assert all_are(2, sums)


def test_buckets_are_gone_with_their_step(sent: list[Tensor]) -> None:
    """And with them what they knew of memory that other tensors lie in by now."""
    sums = filled(FORMS)
    buckets = FlatBuckets([sums])
    with buckets.in_use():
        reduce(sums)
    gone = [weakref.ref(total) for total in sums]
    sent.clear()
    del sums, buckets
    gc.collect()
    assert all(ref() is None for ref in gone)


def test_outside_of_a_step() -> None:
    with pytest.raises(RuntimeError, match="only in a call of its step"):
        reduce(filled(FORMS))


def test_a_bucket_knows_the_view_below_its_sums() -> None:
    sums = filled(FORMS)
    bucket = FlatBucket(sums)
    assert bucket.flat is not None
    assert bucket.flat.numel() == sum(form.numel() for form in FORMS)
    assert FlatBucket(sums[::-1]).flat is None
