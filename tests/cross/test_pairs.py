"""Options, optimizers and models in rows in which every pair of values meets, as code for a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from allpairspy import AllPairs

from tests.cross.cases import Case
from tests.cross.conftest import Lower
from tests.cross.results import (
    every_kernel_became_a_cubin,
    nothing_but_sums,
    one_reduction_for_each_bucket,
    reductions_start_in_backward,
    the_host_never_waits,
)


pytestmark = [pytest.mark.cross, pytest.mark.captured]
VALUES = {
    "optimizer": ["sgd", "adamw", "adafactor", "muon"],
    "precision": ["fp32", "bf16", "autocast"],
    "model": ["mlp", "gpt"],
    "clip": [False, True],
    "weights": [False, True],
    "skip_nonfinite": [False, True],
    "k_each": [False, True],
    "checkpointing": [False, True],
    "wire": [False, True],
    "dynamic": [False, True],
}


def rows() -> Iterator[Case]:
    for row in AllPairs(list(VALUES.values())):
        yield Case(tail=False, **dict(zip(VALUES, row, strict=True)))


@pytest.mark.parametrize("case", list(rows()), ids=str)
def test_a_combination(case: Case, lower: Lower) -> None:
    made = lower(case)
    for program in made.values():
        every_kernel_became_a_cubin(program)
    nothing_but_sums(made["accumulate"])
    the_host_never_waits(made["accumulate"])
    # On a 16-bit wire the weight of each part's window travels alone.
    alone = case.wire and (case.weights or case.skip_nonfinite)
    one_reduction_for_each_bucket(made["boundary"], beside=alone * (1 + case.k_each))
    # A term counts if all of it is finite: then no bucket is whole before the backward is. And a bf16 wire may make one
    # bucket of all.
    if not case.skip_nonfinite and made["boundary"].buckets > 1:
        reductions_start_in_backward(made["boundary"])
    # Nor for Adafactor, whose own code asks for norms by `.item()`.
    the_host_never_waits(made["boundary"])
