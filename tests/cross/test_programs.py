"""The three programs of a plain step as code for a GPU: what has to hold of it, and that a fault is found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync_fx.lowering.target.wrapper import HostEvent
from tests.cross.cases import MICRO_STEPS, TARGETS, Case, plain
from tests.cross.conftest import Lower
from tests.cross.results import (
    attention_is_one_kernel,
    every_kernel_became_a_cubin,
    nothing_but_sums,
    one_reduction_for_each_bucket,
    reductions_start_in_backward,
    sums_are_aligned,
    sums_are_sent_as_they_lie,
    the_host_never_waits,
    updates_are_few_launches,
    waits_stand_at_first_readers,
)


pytestmark = [pytest.mark.cross, pytest.mark.captured]
MLP, GPT = plain("mlp"), plain("gpt")
BOUNDARY = ("boundary",)
FAULTY = Case("mlp", programs=BOUNDARY)
PLAIN = [plain(model, target) for model in ("mlp", "gpt") for target in TARGETS]
each = pytest.mark.parametrize("case", PLAIN, ids=str)


@each
def test_every_kernel_becomes_a_cubin(case: Case, lower: Lower) -> None:
    for made in lower(case).values():
        every_kernel_became_a_cubin(made)


def test_a_cubin_that_is_missing_or_of_another_card_is_found(lower: Lower) -> None:
    made = lower(MLP)["boundary"]
    name, arch, size = made.binaries[0]
    without = tuple(b for b in made.binaries if b[0] != name)
    with pytest.raises(AssertionError, match="was not compiled"):
        every_kernel_became_a_cubin(replace(made, binaries=without))
    with pytest.raises(AssertionError, match="has no cubin"):
        every_kernel_became_a_cubin(replace(made, binaries=(*without, (name, arch, 0))))
    with pytest.raises(AssertionError, match="was compiled for sm_90"):
        every_kernel_became_a_cubin(replace(made, target="sm_80"))
    assert size


@each
def test_a_micro_step_adds_up_and_does_nothing_else(case: Case, lower: Lower) -> None:
    nothing_but_sums(lower(case)["accumulate"])


def test_a_micro_step_that_does_more_is_found(lower: Lower) -> None:
    with pytest.raises(AssertionError, match="gradients are reduced"):
        nothing_but_sums(
            lower(replace(FAULTY, sync_each_batch=True, programs=("accumulate",)))["accumulate"]
        )
    boundary = lower(MLP)["boundary"]
    silent = replace(boundary, events=tuple(boundary.of("launch", "fill", "copy", "extern")))
    with pytest.raises(AssertionError, match="reads or writes state"):
        nothing_but_sums(silent)


@each
def test_a_boundary_reduces_each_bucket_once(case: Case, lower: Lower) -> None:
    made = lower(case)
    one_reduction_for_each_bucket(made["boundary"])
    one_reduction_for_each_bucket(made["tail"])


def test_a_bucket_that_is_reduced_twice_is_found(lower: Lower) -> None:
    with pytest.raises(AssertionError):
        one_reduction_for_each_bucket(lower(replace(FAULTY, fault="reduced_twice"))["boundary"])


@pytest.mark.parametrize("case", [*PLAIN, Case("odd", programs=("boundary", "tail"))], ids=str)
def test_buckets_are_sent_as_they_lie(case: Case, lower: Lower) -> None:
    for name in ("boundary", "tail"):
        sums_are_sent_as_they_lie(lower(case)[name])


def test_buckets_that_are_put_together_are_found(lower: Lower) -> None:
    with pytest.raises(AssertionError, match="all_reduce_.default sends buf"):
        sums_are_sent_as_they_lie(lower(replace(FAULTY, without=("in_place",)))["boundary"])


@each
def test_reductions_start_before_the_backward_ends(case: Case, lower: Lower) -> None:
    reductions_start_in_backward(lower(case)["boundary"])


def test_reductions_that_start_after_the_backward_are_found(lower: Lower) -> None:
    with pytest.raises(AssertionError, match="no product of the backward is left"):
        reductions_start_in_backward(lower(replace(FAULTY, fault="reduced_late"))["boundary"])


@each
def test_each_wait_stands_at_its_first_reader(case: Case, lower: Lower) -> None:
    for name in ("boundary", "tail"):
        waits_stand_at_first_readers(lower(case)[name])


def test_waits_at_one_place_are_found(lower: Lower) -> None:
    with pytest.raises(AssertionError, match="which it does not read"):
        waits_stand_at_first_readers(lower(replace(FAULTY, without=("overlap",)))["boundary"])
    boundary = lower(MLP)["boundary"]
    sent = [HostEvent("reduce", "all_reduce", (n,)) for n in "ab"]
    (wait_a, wait_b), (read_a, read_b) = (
        [HostEvent(kind, kind, (n,)) for n in "ab"] for kind in ("wait", "launch")
    )
    waits_stand_at_first_readers(replace(boundary, events=(*sent, wait_a, read_a, wait_b, read_b)))
    with pytest.raises(AssertionError, match="waits for b"):
        waits_stand_at_first_readers(
            replace(boundary, events=(*sent, wait_a, wait_b, read_a, read_b))
        )


@pytest.mark.parametrize(
    "model",
    ["mlp", "odd"],
)
def test_sums_lie_at_16_bytes(model: str, lower: Lower) -> None:
    sums_are_aligned(lower(MLP if model == "mlp" else replace(FAULTY, model=model))["boundary"])


def test_sums_that_lie_elsewhere_are_found(lower: Lower) -> None:
    boundary = lower(MLP)["boundary"]
    with pytest.raises(AssertionError, match="not at 16 bytes"):
        sums_are_aligned(replace(boundary, offsets={"weight": 0, "bias": 40}))


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_an_update_is_few_launches(model: str, lower: Lower) -> None:
    """Of one bucket, which holds all parameters."""
    made = lower(Case(model, bucket_cap_mb=25.0, programs=BOUNDARY))["boundary"]
    assert made.buckets == 1
    updates_are_few_launches(made)


def test_an_update_of_many_launches_is_found(lower: Lower) -> None:
    boundary = lower(MLP)["boundary"]
    one = HostEvent("launch", "update", writes=("parameter weight",))
    updates_are_few_launches(replace(boundary, events=(one,) * 4 * boundary.buckets))
    with pytest.raises(AssertionError, match="launches for"):
        updates_are_few_launches(replace(boundary, events=(one,) * (4 * boundary.buckets + 1)))


@each
def test_the_host_reads_no_tensor_of_the_device(case: Case, lower: Lower) -> None:
    for made in lower(case).values():
        the_host_never_waits(made)


def test_a_host_that_waits_is_found(lower: Lower) -> None:
    with pytest.raises(AssertionError, match="item"):
        the_host_never_waits(lower(replace(FAULTY, fault="host_waits"))["boundary"])


@pytest.mark.parametrize(("precision", "form"), [("fp32", "efficient"), ("bf16", "flash")])
def test_attention_is_one_kernel(precision: str, form: str, lower: Lower) -> None:
    made = lower(
        GPT if precision == "fp32" else Case("gpt", precision=precision, programs=MICRO_STEPS)
    )
    attention_is_one_kernel(made["accumulate"], form)
    attention_is_one_kernel(made["boundary"], form)


def test_attention_of_another_form_is_found(lower: Lower) -> None:
    with pytest.raises(AssertionError, match="no attention"):
        attention_is_one_kernel(lower(MLP)["accumulate"], "flash")
    with pytest.raises(AssertionError, match="efficient"):
        attention_is_one_kernel(lower(GPT)["accumulate"], "flash")
