"""`overlap_param_gather=True`: parameters on their way between calls, and whoever reads them all the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsync_fx
from gradsync_fx import OptionError
from tests.drive import plain_step
from tests.scenarios import hidden
from tests.workers import Ranks


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize(
    ("name", "k", "clip", "more"),
    [
        ("AdamW", 1, None, {}),
        ("momentum", 3, 0.5, {}),
        ("Adafactor", 2, None, {}),
        ("AdamW", 2, 0.5, {"skip_nonfinite": True, "reduce_dtype": torch.bfloat16}),
        ("AdamW", 1, 0.5, {"average": True}),
    ],
)
def test_to_the_bit_what_it_is_without(
    ranks: Ranks, name: str, k: int, clip: float | None, more: dict[str, Any]
) -> None:
    found = ranks(hidden.trained, name, k, True, clip, more)
    plain = ranks(hidden.trained, name, k, False, clip, more)
    for mine, theirs in zip(found, plain, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert same(mine["values"], theirs["values"])
        assert max(theirs["away"]) == mine["left"] == 0
    assert same(found[0]["values"], found[1]["values"])
    # The first update is compared among the ranks. An average of the weights reads all of them.
    hides = "average" not in more
    assert any(found[0]["away"]) is hides
    ends = [n for call, n in enumerate(found[0]["away"]) if (call + 1) % k]
    assert not any(ends), "nothing is on its way when a call has read all parameters"


@pytest.mark.gloo
@pytest.mark.captured
def test_other_backends_have_all_parameters_before_a_call(ranks: Ranks) -> None:
    more = {"backend": "aot_eager"}
    found = ranks(hidden.trained, "AdamW", 2, True, None, more)
    plain = ranks(hidden.trained, "AdamW", 2, False, None, more)
    assert same(found[0]["values"], plain[0]["values"])
    assert found[0]["losses"] == plain[0]["losses"]


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_who_reads_between_calls_finds_new_parameters(ranks: Ranks) -> None:
    for rank in ranks(hidden.reads):
        assert rank.keys() == hidden.READS.keys()
        for how, found in rank.items():
            assert found["away"] > 0, how
            assert same(found["there"], found["before"]), f"{how}: half of a value was there"
            assert found["left"] == found["hooks"] == 0, how
            assert same(found["after"], found["plain"]), how
            if found["wanted"] is not None:
                assert torch.equal(found["result"], found["wanted"]), how
    loaded = rank["load_state_dict"]["after"]
    assert all(bool((p == 0.25).all()) for p in loaded)


@pytest.mark.gloo
@pytest.mark.inductor
@pytest.mark.captured
def test_a_write_between_calls_is_named_and_settling_first_is_the_way_out(ranks: Ranks) -> None:
    for found in ranks(hidden.written):
        assert len(found["said"]) == 2
        assert all("parameter '0.weight'" in said for said in found["said"])
        assert same(found["values"], found["plain"])


def test_it_needs_shards() -> None:
    with pytest.raises(OptionError, match="overlap_param_gather"):
        gradsync_fx.optimize(plain_step, overlap_param_gather=True)
    with pytest.raises(OptionError, match="overlap_param_gather"):
        gradsync_fx.optimize(plain_step, shard_optimizer=True, overlap_param_gather=1)  # type: ignore[call-overload]
    gradsync_fx.optimize(plain_step, shard_optimizer=True, overlap_param_gather=True)


@pytest.mark.captured
def test_one_rank_has_nothing_to_settle() -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync_fx.optimize(
        plain_step, shard_optimizer=True, overlap_param_gather=True, backend="aot_eager"
    )
    before = model.weight.detach().clone()
    step.settle()
    step(model, optimizer, torch.ones(4, 8), torch.ones(4, 1))
    assert not torch.equal(model.weight, before)
    step.settle()
