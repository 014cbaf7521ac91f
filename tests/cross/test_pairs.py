"""Options, optimizers and models in rows in which every pair of values meets, as code for a GPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, product

import pytest

from tests.cross.cases import MICRO_STEPS, OPTIONS, Case
from tests.cross.conftest import Lower
from tests.cross.results import (
    every_kernel_became_a_cubin,
    nothing_but_sums,
    one_reduction_for_each_bucket,
    reductions_start_in_backward,
    the_host_never_waits,
)
from tests.long import some_long


pytestmark = [pytest.mark.cross, pytest.mark.captured]
# In as few rows as four optimizers with three precisions take, few of them of the GPT: its code takes twice the time.
ROWS = [
    ("sgd", "fp32", "gpt", "weights checkpointing wire dynamic"),
    ("sgd", "bf16", "mlp", "skip_nonfinite k_each"),
    ("sgd", "autocast", "mlp", "clip skip_nonfinite k_each checkpointing dynamic"),
    ("adamw", "fp32", "mlp", "checkpointing dynamic"),
    ("adamw", "bf16", "gpt", "clip k_each"),
    ("adamw", "autocast", "mlp", "clip weights skip_nonfinite k_each checkpointing wire"),
    ("adafactor", "fp32", "mlp", "k_each wire dynamic"),
    ("adafactor", "bf16", "mlp", "clip weights skip_nonfinite k_each checkpointing wire dynamic"),
    ("adafactor", "autocast", "gpt", "clip weights skip_nonfinite"),
    ("muon", "fp32", "mlp", "clip weights skip_nonfinite checkpointing wire"),
    ("muon", "bf16", "mlp", "clip skip_nonfinite"),
    ("muon", "autocast", "gpt", "weights k_each dynamic"),
]
CASES = [
    replace(
        Case(model, optimizer=optimizer, precision=precision, cubins="first", programs=MICRO_STEPS),
        **dict.fromkeys(flags.split(), True),
    )
    for optimizer, precision, model, flags in ROWS
]
each = pytest.mark.parametrize("case", some_long(CASES, 3), ids=str)


def missing_pairs(cases: list[Case]) -> set[tuple[tuple[str, object], tuple[str, object]]]:
    values: dict[str, tuple[object, ...]] = {
        "optimizer": ("sgd", "adamw", "adafactor", "muon"),
        "precision": ("fp32", "bf16", "autocast"),
        "model": ("mlp", "gpt"),
        **dict.fromkeys(OPTIONS, (False, True)),
    }
    every = {
        ((a, one), (b, other))
        for a, b in combinations(values, 2)
        for one, other in product(values[a], values[b])
    }
    met = {
        ((a, getattr(case, a)), (b, getattr(case, b)))
        for case in cases
        for a, b in combinations(values, 2)
    }
    return every - met


def test_every_pair_of_values_meets() -> None:
    assert not missing_pairs(CASES)
    assert all(missing_pairs([c for c in CASES if c is not case]) for case in CASES)


@each
def test_every_kernel_becomes_a_cubin(case: Case, lower: Lower) -> None:
    for made in lower(case).values():
        every_kernel_became_a_cubin(made)


@each
def test_a_micro_step_adds_up_and_does_nothing_else(case: Case, lower: Lower) -> None:
    nothing_but_sums(lower(case)["accumulate"])


@each
def test_a_boundary_reduces_each_bucket_once(case: Case, lower: Lower) -> None:
    boundary = lower(case)["boundary"]
    # On a 16-bit wire the weight of each part's window travels alone.
    alone = case.wire and (case.weights or case.skip_nonfinite)
    one_reduction_for_each_bucket(boundary, beside=alone * (1 + case.k_each))
    # A term counts if all of it is finite: then no bucket is whole before the backward is. And a bf16 wire may make one
    # bucket of all.
    if not case.skip_nonfinite and boundary.buckets > 1:
        reductions_start_in_backward(boundary)


@each
def test_the_host_reads_no_tensor_of_the_device(case: Case, lower: Lower) -> None:
    """Nor for Adafactor, whose own code asks for norms by `.item()`."""
    for made in lower(case).values():
        the_host_never_waits(made)
