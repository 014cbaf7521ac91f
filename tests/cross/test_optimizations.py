"""What the optimizations make of a program for a GPU: each is seen in its code, and is gone where it is left out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gradsync_fx.lowering.target.wrapper import HostEvent
from tests.cross.cases import MICRO_STEPS, Case, plain
from tests.cross.conftest import Lower
from tests.cross.results import Lowered


pytestmark = [pytest.mark.cross, pytest.mark.captured]
PLAIN = replace(plain("mlp"), programs=MICRO_STEPS)
MLP = Case("mlp", programs=MICRO_STEPS)
BOUNDARY = replace(MLP, programs=("boundary",))
COUNT = 8  # of its parameters


def products(made: Lowered) -> list[tuple[str, ...]]:
    """What products are added to where they are made."""
    return [e.writes for e in made.of("extern") if "add_product" in e.name]


@pytest.mark.parametrize("precision", ["fp32", "bf16", "autocast"])
def test_products_go_into_their_sums(precision: str, lower: Lower) -> None:
    """Of all three layers; where the sums are wider than the products, too."""
    case = PLAIN if precision == "fp32" else replace(MLP, precision=precision)
    for name, made in lower(case).items():
        sums = [f"accumulator {layer}.weight" for layer in ("last", "middle.0", "first.0")]
        assert products(made) == [(total,) for total in sums], name


def test_products_by_themselves(lower: Lower) -> None:
    plainly, without = lower(PLAIN), lower(replace(MLP, without=("products",)))
    for name, made in without.items():
        assert products(made) == []
        assert made.source.count("= empty_strided_cuda(") > plainly[name].source.count(
            "= empty_strided_cuda("
        )


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("option", ["", "clip", "weights"])
def test_the_update_of_a_bucket_is_one_launch(option: str, optimizer: str, lower: Lower) -> None:
    """It zeroes the sums, too: no launch fills them."""
    options = dict.fromkeys([option] if option else [], True)
    case = replace(BOUNDARY, optimizer=optimizer, **options)
    if case == BOUNDARY:
        case = PLAIN
    made = lower(case)["boundary"]
    updates = [e for e in made.events if is_update(e)]
    assert [e.kind for e in updates] == ["launch"] * made.buckets
    assert not [e for e in made.of("fill") if any(n.startswith("accumulator") for n in e.writes)]
    zeroed = {n for e in updates for n in e.writes if n.startswith("accumulator ")}
    assert zeroed == {n for n in made.inputs if n.startswith("accumulator ")}


def test_updates_by_themselves(lower: Lower) -> None:
    """A launch for each parameter, and one for each sum that is zeroed."""
    made = lower(replace(BOUNDARY, without=("updates",)))["boundary"]
    fills = [e for e in made.of("fill") if any(n.startswith("accumulator") for n in e.writes)]
    assert len(fills) == COUNT


def test_others_are_updated_before_a_bucket_is_waited_for(lower: Lower) -> None:
    made = lower(PLAIN)["boundary"]
    kinds = [e.kind for e in made.events if e.kind == "wait" or "triton_for" in e.name]
    assert kinds == ["wait", "launch", "wait", "launch"]
    without = lower(replace(BOUNDARY, without=("overlap",)))["boundary"]
    kinds = [e.kind for e in without.events if e.kind == "wait" or "triton_for" in e.name]
    assert kinds == ["wait", "wait", "launch", "launch"]


def norms(made: Lowered) -> list[HostEvent]:
    """What reads sums for a norm: all between the first wait and the updates."""
    first = next(i for i, e in enumerate(made.events) if e.kind == "wait")
    end = next(i for i, e in enumerate(made.events) if is_update(e))
    return [e for e in made.events[first:end] if e.kind not in ("wait", "reduce", "read")]


def is_update(event: HostEvent) -> bool:
    return any(name.startswith("parameter ") for name in event.writes)


def test_a_norm_of_all_gradients_needs_all_buckets(lower: Lower) -> None:
    """Each bucket's are read while another is on its way, and both updates are after the last one."""
    made = lower(replace(BOUNDARY, clip=True))["boundary"]
    waits = [i for i, e in enumerate(made.events) if e.kind == "wait"]
    between = [e.name for e in made.events[waits[0] + 1 : waits[1]] if e.kind != "reduce"]
    assert between == ["torch.ops.gradsync_fx.norms.default"]
    assert not any(is_update(e) for e in made.events[: waits[1]])


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_norms_are_one_op_for_each_bucket(model: str, lower: Lower) -> None:
    """And a kernel that makes a factor of them; not one for each parameter."""
    case = replace(BOUNDARY, model=model, clip=True, bucket_cap_mb=25.0 if model == "gpt" else 0.05)
    made = lower(case)["boundary"]
    assert [e.kind for e in norms(made)] == ["extern"] * made.buckets + ["launch"]
    read = {name for e in norms(made) for name in e.reads if name.startswith("accumulator ")}
    assert read == {n for n in made.inputs if n.startswith("accumulator ")}


def test_norms_by_themselves_are_found(lower: Lower) -> None:
    """In bfloat16: what is normed is rounded first, and lies nowhere."""
    made = lower(replace(BOUNDARY, precision="bf16", clip=True))["boundary"]
    assert len(norms(made)) > COUNT
    assert not [e for e in norms(made) if "norms" in e.name]
