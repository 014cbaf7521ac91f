"""Windows over two ranks that differ in everything they may differ in, against the truth in one process.

Each case is a script for each rank (truth.py); both ranks flush at the end. Checked in all of them: parameters after
every update equal the truth and, bit for bit, the other rank's; accumulate calls are silent; sums end as zeros.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.eagerly import asked
from tests.scripts import play
from tests.truth import Rules, Script, Slot, same
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


def slots(*seeds: int, rows: list[int] | None = None, branches: str = "", bad: str = "") -> Script:
    """A slot for each seed; 0 is a slot without data. `bad` has an x where the slot has a NaN."""
    script: Script = []
    for i, seed in enumerate(seeds):
        branch = branches[i : i + 1] or "both"
        wrong = bad[i : i + 1] == "x"
        script.append(Slot(seed, rows[i] if rows else 4, branch, wrong) if seed else None)
    return script


def check(
    ranks: Ranks, scripts: list[Script], rules: Rules, *, atol: float = 1e-6, **more: Any
) -> list[dict[str, Any]]:
    both = ranks(play, scripts, rules, more)
    for found in both:
        same(found["ours"], found["truth"], atol)
        assert found["steps"] == len(found["truth"])
    for mine, other in zip(both[0]["ours"], both[1]["ours"], strict=True):
        assert all(torch.equal(mine[name], other[name]) for name in mine)
    return both


UNEVEN = [slots(1, 2, 3, rows=[2, 5, 4]), slots(4, 5, 6, 7, 8, rows=[1, 3, 4, 6, 2])]
STEP_OF = {"mean": "plain", "sum": "plain", "weighted": "weighed"}


@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
@pytest.mark.parametrize("k", [1, 2, 4])
def test_ranks_with_different_amounts_of_data(ranks: Ranks, reduction: str, k: int) -> None:
    both = check(ranks, UNEVEN, Rules(k, reduction), step=STEP_OF[reduction])
    for found in both:
        assert all(count == (0, 0) for count in found["collectives"][: k - 1])


@pytest.mark.parametrize("rest", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum", "weighted"])
def test_a_short_window(ranks: Ranks, reduction: str, rest: int) -> None:
    """flush() after every r < k, on both ranks alike."""
    scripts = [
        slots(*range(1, 1 + rest), rows=[1, 5, 2][:rest]),
        slots(*range(9, 9 + rest), rows=[4, 2, 3][:rest]),
    ]
    check(
        ranks, scripts, Rules(4, reduction), step=STEP_OF[reduction], optimizer="adamw", atol=1e-5
    )


def test_slots_without_data(ranks: Ranks) -> None:
    """The last window has no data on either rank: no update, and a warning."""
    scripts = [slots(1, 0, 0, 2, 0, 0), slots(0, 3, 4, 5, 0, 0)]
    for found in check(ranks, scripts, Rules(2)):
        assert len(found["warnings"]) == 1
        assert "without a single term on any rank" in found["warnings"][0]


@pytest.mark.parametrize("step", ["weighed", "weighed_by_tensor"])
def test_weights_travel_with_the_gradients(ranks: Ranks, step: str) -> None:
    """One all-reduce a window for one bucket, the weight in it; one control message."""
    scripts = [slots(1, 2, 3, 4, rows=[2, 5, 4, 1]), slots(5, 6, 7, 8, rows=[1, 3, 4, 6])]
    for found in check(ranks, scripts, Rules(2, "weighted"), step=step):
        # Which parameters have a gradient, and the weights, are told once more where that is known late. After the
        # first update the parameters are compared.
        usual = 4 if asked() else 1
        assert found["collectives"] == [(0, 0), (1, usual + 1), (0, 0), (1, usual)]


@pytest.mark.captured
def test_weights_do_not_suffer_from_a_narrow_wire(ranks: Ranks) -> None:
    """257 samples are not 256: the weight goes alone where the gradients go in bfloat16."""
    scripts = [slots(1, 2, rows=[256, 1]), slots(5, 6, rows=[255, 1])]
    options = {"reduce_dtype": torch.bfloat16}
    found = check(ranks, scripts, Rules(2, "weighted"), step="weighed", options=options, atol=2e-3)
    assert found[0]["collectives"] == [
        (0, 0),
        (2, 2),
    ]  # a gather of the positions, one of the parameters' hash


@pytest.mark.parametrize("options", [{}, {"bucket_cap_mb": 1e-6}])
def test_small_buckets_keep_their_order(ranks: Ranks, options: dict[str, Any]) -> None:
    """A rank in its tail and a rank in its boundary reduce the same buckets in the same order."""
    check(ranks, UNEVEN, Rules(2, "weighted", skip_nonfinite=True), step="weighed", options=options)


def test_micro_steps_that_are_not_finite(ranks: Ranks) -> None:
    """They add nothing on their rank, and do not count."""
    scripts = [slots(1, 2, 3, 9, bad="x..."), slots(4, 5, 6, 7, bad=".xx.")]
    check(ranks, scripts, Rules(2, skip_nonfinite=True))
    check(ranks, scripts, Rules(2, "sum", skip_nonfinite=True))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_branch_that_only_skipped_micro_steps_took(ranks: Ranks, optimizer: str) -> None:
    """On any rank: its parameters rest in that window, and get no state from it."""
    scripts = [
        slots(1, 2, 3, 4, 5, 6, 9, branches="a++aabb", bad=".x...xx"),
        slots(10, 20, 30, 40, 50, 60, branches="ab+aba", bad=".x..x."),
    ]
    rules = Rules(2, skip_nonfinite=True)
    for found in check(ranks, scripts, rules, optimizer=optimizer, atol=1e-5):
        assert len(found["truth"]) == 3


def test_a_window_that_is_not_finite_on_any_rank(ranks: Ranks) -> None:
    scripts = [slots(1, 2, 3, 9, bad="xx.."), slots(4, 5, 6, 7, bad="xxx.")]
    for found in check(ranks, scripts, Rules(2, skip_nonfinite=True)):
        assert len(found["truth"]) == 1
        assert "without a single term" in found["warnings"][0]


@pytest.mark.parametrize("step", ["plain", "clipped"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_every_rank_takes_another_branch(ranks: Ranks, step: str, optimizer: str) -> None:
    """The union over window and ranks is reduced, clipped and updated on all ranks; the rest stays untouched."""
    scripts = [slots(1, 2, 3, 4, 9, branches="abaaa"), slots(5, 6, 7, 8, branches="bbab")]
    for found in check(ranks, scripts, Rules(2), step=step, optimizer=optimizer, atol=1e-5):
        assert found["unused"] == ("idle.weight", "idle.bias")
        assert not any(name.startswith("idle") for name in found["state"])
        assert all(count == (0, 0) for count in found["collectives"][::2])
        if step == "clipped":
            norms = [norm.item() for _, norm in found["outputs"]]
            assert [n == n for n in norms[:4]] == [False, True] * 2


def test_a_branch_that_one_window_does_not_take(ranks: Ranks) -> None:
    """Head b gets no gradient in the first window, and weight decay leaves it alone there."""
    scripts = [slots(1, 2, 3, 4, branches="aaab"), slots(5, 6, 7, 8, branches="aabb")]
    first, second = check(ranks, scripts, Rules(2), optimizer="adamw", atol=1e-5)[0]["truth"]
    assert not torch.equal(first["b.weight"], second["b.weight"])


@pytest.mark.captured
@pytest.mark.parametrize("reduction", ["mean", "weighted"])
def test_sync_each_batch(ranks: Ranks, reduction: str) -> None:
    """k reductions, one update; a rank without data takes part with zeros."""
    rules, options = Rules(3, reduction), {"sync_each_batch": True}
    scripts = [slots(1, 2, 3, rows=[2, 5, 4]), slots(4, 5, 6, rows=[1, 3, 4])]
    step = STEP_OF[reduction]
    for found in check(ranks, scripts, rules, step=step, options=options):
        assert [n for n, _ in found["collectives"]] == [1, 1, 1]
    scripts = [slots(1, 2, 0, 3, rows=[4] * 4), slots(4, 5, 6, 0, 7, 8, rows=[1, 4, 4, 4, 4, 4])]
    check(ranks, scripts, rules, step=step, options=options)


def test_clipping_is_of_the_window_and_of_all_ranks(ranks: Ranks) -> None:
    both = check(ranks, UNEVEN, Rules(2), step="clipped")
    assert both[0]["outputs"][1][1] == both[1]["outputs"][1][1]
