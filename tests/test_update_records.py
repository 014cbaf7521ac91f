"""`on_update`: one record for each update, beside the same windows by hand; on one rank of several, too."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradsync_fx
from gradsync_fx.errors import OptionError
from gradsync_fx.runtime.update_watch import loss_of
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import regression
from tests.scenarios import watched
from tests.workers import Ranks


EAGERLY: dict[str, Any] = {"backend": "aot_eager"}


def check(
    found: list[watched.Row], values: list[torch.Tensor], world: int, skips: bool, infinite: bool
) -> None:
    wanted, parameters = watched.by_hand(world, skips, infinite)
    assert len(found) == len(wanted)
    for row, true in zip(found, wanted, strict=True):
        for name in ("terms", "skipped", "update", "micro_step"):
            assert row[name] == true[name], name
        for name in ("loss", "gradient_norms", "learning_rates"):
            assert row[name] == pytest.approx(true[name], rel=1e-4), name
        assert row["boundary_seconds"] > 0
        assert row["accumulate_seconds"] > 0 or skips or row is found[-1]
    torch.testing.assert_close(values, parameters, atol=2e-5, rtol=1e-4)


@pytest.mark.captured
@pytest.mark.parametrize(
    ("kind", "more", "infinite"),
    [
        ("captured", EAGERLY, False),
        ("named", EAGERLY, False),
        ("captured", {**EAGERLY, "skip_nonfinite": True}, True),
        ("eager", EAGERLY, False),
        ("eager", {**EAGERLY, "skip_nonfinite": True}, True),
        pytest.param("captured", {}, False, marks=pytest.mark.inductor),
        pytest.param("captured", {"skip_nonfinite": True}, True, marks=pytest.mark.inductor),
    ],
)
@pytest.mark.filterwarnings("ignore:the step runs eagerly")
def test_one_rank(kind: str, more: dict[str, Any], infinite: bool) -> None:
    found, values, order = watched.records(0, 1, kind, more, infinite=infinite)
    check(found, values, 1, False, infinite)
    assert all(row["bytes_sent"] == 0 and row["exposed_seconds"] == 0.0 for row in found)
    assert order == ["record", "call"] * watched.WINDOWS + ["flush", "record"]


@pytest.mark.gloo
@pytest.mark.captured
@pytest.mark.parametrize(
    ("kind", "more", "skips", "infinite"),
    [
        ("captured", EAGERLY, True, False),
        ("captured", {**EAGERLY, "skip_nonfinite": True}, False, True),
        ("captured", {**EAGERLY, "sync_each_batch": True}, False, False),
        ("eager", EAGERLY, True, False),
        pytest.param("captured", {}, True, False, marks=pytest.mark.inductor),
        pytest.param(
            "captured", {"shard_optimizer": True}, False, False, marks=pytest.mark.inductor
        ),
    ],
)
def test_one_rank_of_two_watches(
    ranks: Ranks, kind: str, more: dict[str, Any], skips: bool, infinite: bool
) -> None:
    """The second one: what it is told of is the mean of both."""
    first, second = ranks(watched.records, 2, kind, more, 1, skips, infinite)
    assert not first[0]
    check(second[0], second[1], 2, skips, infinite)
    assert all(map(torch.equal, first[1], second[1]))
    whole = sum(p.numel() * 4 for p in second[1])
    times = watched.K if more.get("sync_each_batch") else 1
    both_ways = 2 if more.get("shard_optimizer") else 1
    sent = [row["bytes_sent"] for row in second[0]]
    assert sent == [times * both_ways * whole] * watched.WINDOWS + [both_ways * whole]
    measured = not more  # sums that are reduced where they lie
    assert all((row["exposed_seconds"] is not None) == measured for row in second[0])


@pytest.mark.gloo
@pytest.mark.captured
def test_what_a_callback_raises_ends_its_call_when_the_window_is_closed(ranks: Ranks) -> None:
    first, second = ranks(watched.raising)
    notes = [note for _, note in first["raised"]]
    assert [text for text, _ in first["raised"]] == ["of update 1", "of update 3"]
    assert all("raised by the on_update callback, of update" in note for note in notes)
    assert first["pending"] == [(0, 1), (0, 3)]
    assert not second["raised"]
    assert all(map(torch.equal, first["values"], second["values"]))


@pytest.mark.gloo
@pytest.mark.captured
def test_records_may_be_kept(ranks: Ranks) -> None:
    for found, means in ranks(watched.loss_is_asked_for_late):
        assert found == pytest.approx(means, rel=1e-6)


@pytest.mark.captured
def test_a_dropped_window_is_in_no_record() -> None:
    """Nor is a step that returns nothing, and one that does not clip."""
    found: list[gradsync_fx.UpdateRecord] = []
    step = quick(plain_step, 2, on_update=found.append)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    (first, *_), (second, third) = regression(2, 2)
    step(model, optimizer, *first)
    step.discard()
    losses = [float(step(model, optimizer, *b)) for b in (second, third)]
    (record,) = found
    assert record.loss == pytest.approx(sum(losses) / 2)
    assert (record.terms, record.skipped, record.micro_step) == (2, 0, 3)
    assert record.gradient_norm is None
    assert record.gradient_norms == ()


@pytest.mark.captured
def test_each_optimizer_with_a_window_of_its_own() -> None:
    found: list[gradsync_fx.UpdateRecord] = []
    models = [mlp(), mlp()]
    optimizers = [
        torch.optim.SGD(m.parameters(), lr) for m, lr in zip(models, (0.1, 0.2), strict=True)
    ]

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = torch.stack([torch.nn.functional.mse_loss(m(x), y) for m in models]).sum()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    step = gradsync_fx.optimize(
        train_step,
        gradient_accumulation_steps=dict(zip(optimizers, (1, 2), strict=True)),
        on_update=found.append,
        backend="aot_eager",
    )
    losses = [float(step(x, y)) for (x, y) in regression(1, 4)[0]]
    assert [r.loss for r in found] == pytest.approx(losses)
    assert [r.learning_rates for r in found] == [(0.1, 0.2)] * 4


def test_what_counts_as_a_loss() -> None:
    loss = torch.tensor(0.5)
    for result in (loss, loss.reshape(1), (loss, torch.ones(3)), [loss], {"x": 1, "loss": loss}):
        found = loss_of(result)
        assert found is not None
        assert float(found) == 0.5
    for other in (None, 0.5, torch.ones(2), torch.tensor(1), "loss", (), {"x": loss}):
        assert loss_of(other) is None


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(OptionError, match="on_update"):
        gradsync_fx.optimize(plain_step, on_update="print")  # type: ignore[call-overload]
