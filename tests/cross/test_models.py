"""Models of others as code for a GPU: BERT of transformers, and convolutions with BatchNorm."""

from __future__ import annotations

import pytest

from tests.cross.cases import TARGETS, Case, plain
from tests.cross.conftest import Lower
from tests.cross.results import (
    attention_is_one_kernel,
    every_kernel_became_a_cubin,
    nothing_but_sums,
    one_reduction_for_each_bucket,
    reductions_start_in_backward,
    the_host_never_waits,
)


pytestmark = [pytest.mark.cross, pytest.mark.captured]
MODELS = [plain(model, target) for model in ("bert", "resnet") for target in TARGETS]
each = pytest.mark.parametrize("case", MODELS, ids=str)


@each
def test_every_kernel_becomes_a_cubin(case: Case, lower: Lower) -> None:
    for made in lower(case).values():
        every_kernel_became_a_cubin(made)


@each
def test_the_host_reads_no_tensor_of_the_device(case: Case, lower: Lower) -> None:
    for made in lower(case).values():
        the_host_never_waits(made)


@each
def test_a_micro_step_adds_up_and_does_nothing_else(case: Case, lower: Lower) -> None:
    nothing_but_sums(lower(case)["accumulate"])


@each
def test_a_boundary_reduces_each_bucket_once(case: Case, lower: Lower) -> None:
    made = lower(case)
    one_reduction_for_each_bucket(made["boundary"])
    one_reduction_for_each_bucket(made["tail"])


@each
def test_reductions_start_before_the_backward_ends(case: Case, lower: Lower) -> None:
    reductions_start_in_backward(lower(case)["boundary"])


def test_attention_of_bert_is_one_kernel(lower: Lower) -> None:
    attention_is_one_kernel(lower(plain("bert"))["accumulate"], "efficient")


def test_convolutions_are_the_librarys(lower: Lower) -> None:
    """cuDNN's: their code is not made here."""
    names = [e.name for e in lower(plain("resnet"))["accumulate"].of("extern")]
    assert sum("convolution" in name for name in names) == 12  # 6, and the backward of each
