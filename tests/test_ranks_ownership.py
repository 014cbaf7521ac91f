"""Which parameters the ranks share: those in DDP and not ignored; everything else is each rank's own, as in eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.scenarios import ownership
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def check_parts(both: list[dict[str, Any]], local: set[str]) -> None:
    for found in both:
        torch.testing.assert_close(found["ours"], found["eager"], atol=1e-6, rtol=1e-5)
        told = ", ".join(found["warnings"])
        assert all((name in told) == (name in local) for name in found["parameters"])
    for name in both[0]["parameters"]:
        alike = torch.equal(both[0]["ours"][name], both[1]["ours"][name])
        assert alike == (name not in local), name


OUTSIDE = {
    "body": {"head.0.weight", "head.0.bias", "head.1.weight", "head.1.bias"},
    "both": set(),
    "ignored": {"body.0.weight", "head.0.weight"},
}


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("how", list(OUTSIDE))
def test_parts_that_ddp_does_not_hold(ranks: Ranks, how: str, k: int) -> None:
    check_parts(ranks(ownership.parts, how, k), OUTSIDE[how])


@pytest.mark.inductor
@pytest.mark.parametrize("how", ["body", "ignored"])
def test_parts_that_ddp_does_not_hold_with_inductor(ranks: Ranks, how: str) -> None:
    check_parts(ranks(ownership.parts, how, 2, False, "inductor"), OUTSIDE[how])


@pytest.mark.filterwarnings("ignore:the step runs eagerly")
@pytest.mark.parametrize("how", list(OUTSIDE))
def test_parts_that_ddp_does_not_hold_eagerly(ranks: Ranks, how: str) -> None:
    for found in ranks(ownership.parts, how, 2, True):
        torch.testing.assert_close(found["ours"], found["eager"], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("how", ["functional_call", "factor"])
@pytest.mark.parametrize(("eagerly", "backend"), [(False, "aot_eager"), (True, "aot_eager")])
def test_tensors_that_no_module_holds_are_local_beside_ddp(
    ranks: Ranks, how: str, eagerly: bool, backend: str
) -> None:
    both = ranks(ownership.loose, "ddp", how, eagerly, backend)
    for found in both:
        torch.testing.assert_close(found["ours"], found["eager"], atol=1e-6, rtol=1e-5)
    assert not torch.equal(both[0]["ours"][0], both[1]["ours"][0])


@pytest.mark.parametrize("how", ["functional_call", "factor"])
def test_tensors_that_no_module_holds_are_reduced_without_ddp(ranks: Ranks, how: str) -> None:
    both = ranks(ownership.loose, "plain", how, False, "aot_eager")
    pairs = zip(both[0]["ours"], both[1]["ours"], strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def check_inputs(both: list[dict[str, Any]]) -> None:
    for found in both:
        torch.testing.assert_close(found["ours"], found["eager"], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found["inputs"], found["theirs"], atol=1e-6, rtol=1e-5)
        assert found["sums"] == ["bias", "weight"]


@pytest.mark.parametrize("wrap", ["ddp", "plain"])
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("how", ["new", "same", "alike"])
def test_inputs_keep_their_own_gradients(ranks: Ranks, how: str, k: int, wrap: str) -> None:
    check_inputs(ranks(ownership.inputs, how, k, wrap, {"backend": "aot_eager"}))


@pytest.mark.parametrize("how", ["new", "same"])
def test_inputs_keep_their_own_gradients_eagerly(ranks: Ranks, how: str) -> None:
    check_inputs(ranks(ownership.inputs, how, 2, "ddp", {"on_unsupported": "eager"}))


@pytest.mark.inductor
def test_inputs_keep_their_own_gradients_with_inductor(ranks: Ranks) -> None:
    check_inputs(ranks(ownership.inputs, "new", 2, "ddp", {"backend": "inductor"}))
