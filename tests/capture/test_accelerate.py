"""Steps that use Accelerate, through `optimize` as they are: equal to Accelerate's own loop on the same data."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType

import gradsync_fx
from tests.drive import quick
from tests.reference import assert_bitwise, assert_same
from tests.refusals import refused
from tests.scenarios import accelerated
from tests.workers import Ranks


STYLES = ["documented", "by_value", "bare"]


def check(facts: dict[str, Any], lengths: list[int], *, atol: float = 1e-6) -> None:
    assert_same(facts["found"], facts["expected"], atol=atol)
    assert facts["rates"] == facts["expected_rates"]
    assert facts["updates"] == len(lengths)
    assert facts["compiled"] == (3 if lengths[-1] < lengths[0] else min(lengths[0], 2))


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("k", [1, 3])
def test_one_rank(style: str, k: int) -> None:
    check(accelerated.both(None, {"style": style}, [k] * 3), [k] * 3)


@pytest.mark.parametrize(
    "how",
    [
        {"optimizer": "adamw"},
        {"scheduler": "lambda"},
        {"scheduler": "onecycle"},
        {"around": True},
        {"declares": 3},
        {"declares": 3, "around": True},
    ],
    ids=str,
)
def test_one_rank_in_other_ways(how: dict[str, Any]) -> None:
    atol = 1e-5 if "optimizer" in how else 1e-6
    check(accelerated.both(None, {"style": "documented", **how}, [3] * 3), [3] * 3, atol=atol)


@pytest.mark.parametrize("style", STYLES)
def test_a_short_window_is_a_mean_over_what_it_has(style: str) -> None:
    check(accelerated.both(None, {"style": style}, [3, 3, 2]), [3, 3, 2])


def test_mixed_precision() -> None:
    lengths = [2] * 3
    how = {"style": "by_value", "precision": "bf16"}
    check(accelerated.both(None, how, lengths), lengths, atol=1e-6)


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("how", "lengths"),
    [
        *(({"style": style}, [2, 2, 2]) for style in STYLES),
        ({"style": "documented", "optimizer": "adamw"}, [3, 3]),
        ({"style": "documented", "scheduler": "onecycle"}, [2, 2, 2]),
        ({"style": "documented", "around": True, "declares": 2}, [2, 2]),
        ({"style": "documented"}, [3, 3, 1]),
        ({"style": "bare"}, [1, 1]),
    ],
    ids=str,
)
def test_two_ranks(ranks: Ranks, how: dict[str, Any], lengths: list[int]) -> None:
    atol = 1e-5 if "optimizer" in how else 1e-6
    first, second = ranks(accelerated.both, how, lengths)
    for facts in (first, second):
        check(facts, lengths, atol=atol)
        assert facts["wrapped"]
        k = lengths[0]
        closing = [i % k == k - 1 for i in range(len(facts["sums"]))]
        assert facts["sums"] == [int(closes) for closes in closing]
    assert_bitwise(first["found"], second["found"])


def test_what_runs_after_the_step_sees_the_schedule() -> None:
    """Outside of the step, Accelerate's scheduler advances when it is called, once for each process."""
    with accelerated.launched(None):
        p = accelerated.prepared({}, 1)

        def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = accelerated.mse(p.model, x, y)
            p.accelerator.backward(loss)
            p.optimizer.step()
            p.optimizer.zero_grad()
            return loss

        run = quick(step, 2)
        for _ in range(4):
            run(torch.randn(4, 8), torch.randn(4, 1))
            if run.sync_gradients:
                p.scheduler.step()
        assert p.scheduler.get_last_lr()[0] == pytest.approx(0.1 * 0.7**2)


@pytest.mark.parametrize(
    ("what", "culprit"), [("fp16", "accelerator.backward"), ("fsdp", "accelerator.backward")]
)
def test_refused(what: str, culprit: str) -> None:
    with accelerated.launched(None):
        p = accelerated.prepared({}, 1)
        if what == "fp16":
            p.accelerator.scaler = torch.amp.GradScaler("cpu")
        else:
            p.accelerator.state.distributed_type = DistributedType.FSDP
        run = quick(accelerated.step_of(p, "bare"), 2)
        refused(gradsync_fx.CaptureError, culprit, run, torch.randn(4, 8), torch.randn(4, 1))


def test_another_k_of_the_accelerator_is_an_error() -> None:
    with accelerated.launched(None):
        p = accelerated.prepared({}, 4)
        batch = torch.randn(4, 8), torch.randn(4, 1)
        step = accelerated.step_of(p, "documented")
        for k in (1, 2):
            error = refused(gradsync_fx.CaptureError, "the Accelerator", quick(step, k), *batch)
            assert f"is 4 there, and {k} in" in error.seen
        quick(step, 4)(*batch)
        assert quick(step, "manual")(*batch).isfinite()  # type: ignore[arg-type]


def test_nothing_is_imported_for_others() -> None:
    script = """
import sys, torch, gradsync_fx
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
def step(x):
    loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad(); return loss
gradsync_fx.optimize(step, backend="eager")(torch.ones(1, 2))
assert not {"accelerate", "transformers", "lightning"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
