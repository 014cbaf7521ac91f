"""`commit=`: updates that are refused between the halves, on one rank and on two, beside the same windows by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import gradsync_fx
from gradsync_fx.errors import CaptureError, OptionError, WindowError
from tests.drive import plain_step
from tests.long import some_long
from tests.scenarios import fault_tolerant, voted
from tests.workers import Ranks


BALLOTS: voted.Ballots = [
    (False, True),  # the first window, which would make the optimizer's state
    (True, True),
    (True, False),
    (True, True),
    (False, False),
    (True, True),
]
ONE: list[Any] = [row[:1] for row in BALLOTS]


def check(
    found: dict[str, Any], wanted: dict[str, Any], ballots: voted.Ballots, world: int
) -> None:
    """Values of the run by hand; parameters that a refusal leaves to the bit; counters; the scheduler."""
    counts = [all(said is True for said in row[:world]) for row in ballots]
    assert found["synced"] == counts
    assert found["asked"] == len(ballots)
    assert [c[1] for c in found["counts"]] == [sum(counts[: i + 1]) for i in range(len(counts))]
    assert [c[2] for c in found["counts"]] == [0] * len(counts)
    assert found["rate"] == pytest.approx(wanted["rate"])
    assert found["sums"] == 0.0
    before = [p.detach() for p in voted._model().parameters()]
    for made, mine, truth in zip(counts, found["parameters"], wanted["parameters"], strict=True):
        same = all(map(torch.equal, mine, before))
        assert same is not made
        torch.testing.assert_close(mine, truth, atol=2e-6, rtol=2e-5)
        before = mine


@pytest.mark.captured
@pytest.mark.parametrize("name", [n for n in voted.OPTIMIZERS if n != "Muon"])
def test_one_rank(name: str) -> None:
    check(*voted.both(0, 1, name, ONE, {"backend": "aot_eager"}), ONE, 1)


@pytest.mark.inductor
@pytest.mark.parametrize("name", ["AdamW", "momentum"])
def test_one_rank_compiled(name: str) -> None:
    check(*voted.both(0, 1, name, ONE, {}), ONE, 1)


@pytest.mark.captured
def test_one_rank_flushed_and_refused() -> None:
    refused = [*ONE[:2], (False,)]
    found, wanted = voted.both(0, 1, "AdamW", refused, {"backend": "aot_eager"}, True)
    check(found, wanted, refused, 1)
    assert found["updates"] == 0


@pytest.mark.gloo
@pytest.mark.parametrize("flushed", some_long([False, True], 2))
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("AdamW", {}),
        ("momentum", {"without": ("updates", "in_place")}),
        ("AdamW", {"shard_optimizer": True}),
        ("AdamW", {"reduce_dtype": torch.bfloat16}),
        ("AdamW", {"skip_nonfinite": True}),
        ("Looking", {}),
    ],
)
@pytest.mark.parametrize(
    "backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)]
)
def test_two_ranks(
    ranks: Ranks, backend: str, name: str, more: dict[str, Any], flushed: bool
) -> None:
    more = {**more, "backend": backend}
    if backend == "aot_eager":
        more.pop("without", None)
    results = ranks(voted.both, 2, name, BALLOTS, more, flushed)
    for found, wanted in results:
        if "reduce_dtype" in more:
            wanted["parameters"] = found[
                "parameters"
            ]  # rounded on the wire: only what is refused is compared
        check(found, wanted, BALLOTS, 2)
    for mine, other in zip(*(found["parameters"] for found, _ in results), strict=True):
        assert all(map(torch.equal, mine, other))


@pytest.mark.gloo
def test_what_one_rank_raises_refuses_for_all(ranks: Ranks) -> None:
    ballots: voted.Ballots = [(True, True), (True, "no disk"), (True, True)]
    results = ranks(voted.both, 2, "AdamW", ballots, {"backend": "aot_eager"})
    for found, wanted in results:
        check(found, wanted, ballots, 2)
    assert [found["raised"] for found, _ in results] == [["", "", ""], ["", "no disk", ""]]


@pytest.mark.gloo
def test_a_rank_that_raises_while_it_flushes_takes_part_to_the_end(ranks: Ranks) -> None:
    one, other = ranks(voted.flushed_early)
    assert (one["raised"], other["raised"]) == ("", "no disk")
    assert (one["updates"], one["asked"]) == (other["updates"], other["asked"])
    assert one["updates"] == one["asked"] - 1 == 1
    assert all(map(torch.equal, one["values"], other["values"]))


@pytest.mark.gloo
def test_a_vote_on_one_rank_only_is_named_on_all(ranks: Ranks) -> None:
    assert all("commit" in said for said in ranks(voted.unlike))


@pytest.mark.gloo
def test_a_step_that_runs_eagerly(ranks: Ranks) -> None:
    results = ranks(voted.eagerly, 2, BALLOTS)
    for found, wanted in results:
        check(found, wanted, BALLOTS, 2)


@pytest.mark.captured
def test_a_value_that_only_the_update_gives_is_nan_where_it_is_refused() -> None:
    found, _ = voted.both(0, 1, "AdamW", ONE, {"backend": "aot_eager"})
    assert found["norms"][0] is not None


def test_commit_is_a_callable_that_answers() -> None:
    with pytest.raises(OptionError, match="commit"):
        gradsync_fx.optimize(plain_step, commit=True)  # type: ignore[call-overload]


@pytest.mark.captured
def test_commit_that_returns_nothing_is_named() -> None:
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync_fx.optimize(plain_step, commit=lambda: None, backend="aot_eager")  # type: ignore[arg-type,return-value]
    before = model.weight.detach().clone()
    with pytest.raises(OptionError, match="returned None"):
        step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    assert torch.equal(model.weight, before)
    assert (step.optimizer_step, step.pending) == (0, 0)
    step = gradsync_fx.optimize(plain_step, commit=lambda: True, backend="aot_eager")
    step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    assert step.optimizer_step == 1


@pytest.mark.captured
def test_the_step_is_not_used_inside_of_commit_and_losses_decide() -> None:
    """Its sums are on their way there. The way out: what the calls returned."""
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for use in ("gradients", "flush", "skip", "state_dict"):
        inside: list[Any] = []
        step = gradsync_fx.optimize(plain_step, commit=lambda: inside[0](), backend="aot_eager")  # noqa: B023
        inside.append(getattr(step, use))
        with pytest.raises(WindowError, match="used inside of commit"):
            step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
        assert (step.optimizer_step, step.pending) == (0, 0)
        assert step.gradients()
    losses: list[torch.Tensor] = []
    step = gradsync_fx.optimize(
        plain_step,
        gradient_accumulation_steps=2,
        commit=lambda: all(loss.isfinite() for loss in losses),
        backend="aot_eager",
    )
    for x in (torch.ones(4, 8), torch.ones(4, 8)):
        losses.append(step(model, optimizer, x, torch.ones(4, 1)))
    assert step.optimizer_step == 1


@pytest.mark.captured
def test_parameters_that_forward_writes_are_refused_by_name() -> None:
    def writes(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        with torch.no_grad():
            model.weight.add_(x.mean())
        return plain_step(model, optimizer, x, y)

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = gradsync_fx.optimize(writes, commit=lambda: True, backend="aot_eager")
    with pytest.raises(CaptureError, match="commit, parameter 'weight'"):
        step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    step = gradsync_fx.optimize(writes, backend="aot_eager")
    step(model, optimizer, torch.randn(4, 8), torch.randn(4, 1))
    assert step.optimizer_step == 1


@pytest.mark.gloo
@pytest.mark.inductor
def test_the_managers_of_torchft_vote(tmp_path: Path) -> None:
    """An error that one of them knows of refuses the update of its whole replica group.

    In ranks of its own: its threads do not end with a manager.
    """
    pytest.importorskip(
        "torchft", reason="torchft is not installed: it has no package for this platform"
    )
    from torchft.coordination import LighthouseServer

    lighthouse, ranks = LighthouseServer(bind="127.0.0.1:0", min_replicas=1), Ranks(tmp_path)
    try:
        results = ranks(fault_tolerant.trained, lighthouse.address())
    finally:
        ranks.stop()
        lighthouse.shutdown()
    for found in results:
        assert found["synced"] == [True, False, True]
        assert found["updates"] == found["committed"] == 2
        before, first, refused, last = found["values"]
        assert torch.equal(first, refused)
        assert not torch.equal(before, first)
        assert not torch.equal(refused, last)
    assert all(map(torch.equal, *(found["values"] for found in results)))
