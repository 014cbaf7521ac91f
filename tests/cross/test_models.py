"""Models of others as code for a GPU: BERT of transformers, and convolutions with BatchNorm."""

from __future__ import annotations

import pytest

from tests.cross.cases import TARGETS, Case
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
MODELS = [Case(model, target=target) for model in ("bert", "resnet") for target in TARGETS]


@pytest.mark.parametrize("case", MODELS, ids=str)
def test_a_model(case: Case, lower: Lower) -> None:
    made = lower(case)
    for program in made.values():
        every_kernel_became_a_cubin(program)
        the_host_never_waits(program)
    nothing_but_sums(made["accumulate"])
    one_reduction_for_each_bucket(made["boundary"])
    one_reduction_for_each_bucket(made["tail"])
    reductions_start_in_backward(made["boundary"])


def test_attention_of_bert_is_one_kernel(lower: Lower) -> None:
    attention_is_one_kernel(lower(Case("bert"))["accumulate"], "efficient")


def test_convolutions_are_the_librarys(lower: Lower) -> None:
    """cuDNN's: their code is not made here."""
    names = [e.name for e in lower(Case("resnet"))["accumulate"].of("extern")]
    assert sum("convolution" in name for name in names) == 12  # 6, and the backward of each
