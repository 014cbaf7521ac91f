"""Tensors that a step puts in the place of others: once per update where they are made of it, as in plain PyTorch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync_fx
from tests.refusals import refused
from tests.scenarios.rebound import (
    FORMS,
    Trainer,
    beside_plain,
    compare,
    made_anew,
    optimized,
    plainly,
)
from tests.workers import Ranks


SETTABLE = [name for name in FORMS if name != "made_anew"]
# Two tensors in one container, made of each other: a count has to be changed in place where the step runs eagerly.
EAGERLY = [name for name in FORMS if name != "counted"]


@pytest.mark.captured
@pytest.mark.parametrize("name", SETTABLE)
def test_once_per_update(name: str) -> None:
    form = FORMS[name]
    compare(optimized(0, form, backend="aot_eager"), plainly(0, form))


@pytest.mark.parametrize("name", EAGERLY)
def test_once_per_update_eagerly(name: str) -> None:
    form = FORMS[name]
    compare(optimized(0, form, eager=True, backend="aot_eager"), plainly(0, form))


@pytest.mark.captured
@pytest.mark.inductor
@pytest.mark.gloo
@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True}], ids=str)
def test_on_two_ranks(ranks: Ranks, options: dict[str, Any]) -> None:
    one, other = ranks(beside_plain, "average", False, options)
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.gloo
def test_on_two_ranks_eagerly(ranks: Ranks) -> None:
    one, other = ranks(beside_plain, "new_key", True, {"backend": "aot_eager"})
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


@pytest.mark.captured
def test_containers_made_anew_are_refused_with_their_line() -> None:
    """And the advice works: the same, written into the tensors that are there, or an eager run."""
    with pytest.raises(gradsync_fx.CaptureError, match=r"of\.row.*rebound\.py:\d+") as caught:
        optimized(0, made_anew, backend="aot_eager")
    assert "average.mul_(0.9)" in caught.value.fix

    def written(of: Trainer) -> None:
        of.row[0].mul_(0.9).add_(of.bias(), alpha=0.1)

    compare(optimized(0, written, backend="aot_eager"), plainly(0, written))


@pytest.mark.captured
def test_what_is_made_of_data_alone_is_put_there_in_every_call() -> None:
    model, seen = nn.Linear(2, 1), {"loss": torch.zeros(())}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(x: Tensor) -> None:
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen["loss"] = 0.5 * seen["loss"] + loss.detach()

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=3, backend="aot_eager")
    data, wanted = [torch.full((1, 2), float(i)) for i in range(3)], torch.zeros(())
    for x in data:
        wanted = 0.5 * wanted + model(x).square().mean().detach()
        run(x)
        torch.testing.assert_close(seen["loss"], wanted)


@pytest.mark.captured
def test_windows_of_their_own_are_refused() -> None:
    """And the advice works."""
    one, two = nn.Linear(2, 2), nn.Linear(2, 1)
    a, b = (torch.optim.SGD(m.parameters(), 0.1) for m in (one, two))
    kept = {"average": torch.zeros(1)}

    def update(x: Tensor) -> None:
        F.mse_loss(two(one(x)), torch.ones(1, 1)).backward()
        a.step()
        b.step()

    def anew(x: Tensor) -> None:
        update(x)
        kept["average"] = 0.9 * kept["average"] + two.bias.detach()

    def in_place(x: Tensor) -> None:
        update(x)
        kept["average"].mul_(0.9).add_(two.bias.detach())

    def optimized_step(step: Any) -> Any:
        k = {a: 1, b: 2}
        return gradsync_fx.optimize(step, gradient_accumulation_steps=k, backend="aot_eager")

    refused(gradsync_fx.CaptureError, "kept.average", optimized_step(anew), torch.ones(1, 2))
    run = optimized_step(in_place)
    run(torch.ones(1, 2))
    assert float(kept["average"]) == 0.0
    run(torch.ones(1, 2))
    torch.testing.assert_close(kept["average"], two.bias.detach())


def test_a_count_that_is_made_anew_is_refused_eagerly() -> None:
    """And the advice works."""
    form = FORMS["counted"]
    with pytest.raises(gradsync_fx.CaptureError, match=r"'count' in the step") as caught:
        optimized(0, form, eager=True, backend="aot_eager")
    assert "count.add_(1)" in caught.value.fix

    def in_place(of: Trainer) -> None:
        of.count.add_(1)
        of.average = of.average + (of.bias() - of.average) / of.count

    compare(optimized(0, in_place, eager=True, backend="aot_eager"), plainly(0, in_place))
