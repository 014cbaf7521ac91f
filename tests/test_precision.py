"""Low precision: sums in float32, one rounding on the wire, autocast inside the step."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick, step_of
from tests.models import Lin, mlp
from tests.optimizers import OPTIMIZERS
from tests.reference import regression
from tests.scenarios import precision
from tests.workers import Ranks


COMPILED = (pytest.mark.inductor, pytest.mark.captured)
CAPTURED = pytest.param(
    True, marks=pytest.mark.captured
)  # sync_each_batch: eager windows refuse it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulator", [None, torch.float32, torch.bfloat16, torch.float64])
def test_256_and_1_are_257(dtype: torch.dtype, accumulator: torch.dtype | None) -> None:
    """In bfloat16 they are 256."""
    model = Lin().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(
        step_of(lambda model, x: model(x)), 3, reduction="sum", accumulator_dtype=accumulator
    )
    step(model, optimizer, torch.tensor(256.0, dtype=dtype))
    step(model, optimizer, torch.tensor(1.0, dtype=dtype))
    (held,) = step.gradients().values()
    assert held.dtype is (accumulator or torch.float32)
    assert held.item() == (256.0 if accumulator is torch.bfloat16 else 257.0)
    step(model, optimizer, torch.tensor(-250.0, dtype=dtype))
    assert model.w.item() == (-6.0 if accumulator is torch.bfloat16 else -7.0)


def test_parameters_of_other_precisions_keep_their_own() -> None:
    model = mlp()
    model[2].double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def loss_of(model: Any, x: Tensor, y: Tensor) -> Tensor:
        return (model[2](torch.relu(model[0](x)).double()) - y).pow(2).mean()

    step = quick(step_of(loss_of), 2)
    step(model, optimizer, *regression(1, 1)[0][0])
    kinds = {name: t.dtype for name, t in step.gradients().items()}
    assert kinds["0.weight"] is torch.float32
    assert kinds["2.weight"] is torch.float64


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_autocast_inside_the_step(backend: str) -> None:
    """Equal to eager accumulation under autocast; parameters and sums stay float32."""

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.mse_loss(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = mlp()
    other = copy.deepcopy(model)
    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, other))
    run = quick(step, 2, backend=backend)
    for window in regression(3, 2):
        for x, y in window:
            run(model, optimizer, x, y)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.mse_loss(other(x).float(), y)
            (loss / 2).backward()
        theirs.step()
        theirs.zero_grad()
    for mine, its in zip(model.parameters(), other.parameters(), strict=True):
        assert mine.dtype is torch.float32
        # bfloat16 has 8 bits; Inductor may keep more of them between two operations.
        torch.testing.assert_close(mine, its, atol=1e-6 if backend == "aot_eager" else 2e-3, rtol=0)


@pytest.mark.gloo
@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_the_wire_rounds_the_sum_once(ranks: Ranks, wire: torch.dtype) -> None:
    """Rank sums of 257 and 3: the sums are rounded for the wire, not their terms."""
    for weight, sums in ranks(precision.on_the_wire, wire):
        local = torch.tensor([256.0 + 1.0, 3.0])
        ahead = 4 if wire is torch.float16 else 1  # divided before a wire whose range is narrow
        wanted = (local / ahead).to(wire).sum().float() / (4 / ahead)
        assert weight == -wanted.item()
        assert sums == {"w": torch.float32}


@pytest.mark.gloo
def test_a_float16_wire_does_not_overflow(ranks: Ranks) -> None:
    """Four terms of 40,000: their sum is beyond float16, their mean is not."""
    assert ranks(precision.large) == [-40000.0, -40000.0]


@pytest.mark.gloo
def test_ddps_compression_hook_is_a_wire(ranks: Ranks) -> None:
    """float16 only: torch refuses to register the bfloat16 hook with gloo."""
    for found in ranks(precision.compressed, "fp16_compress_hook"):
        assert found["bytes"] * 2 == found["plain_bytes"]
        torch.testing.assert_close(found["ours"], found["eager"], atol=2e-3, rtol=0)


@pytest.mark.inductor
@pytest.mark.captured
@pytest.mark.parametrize("name", ["SGD", "momentum", "AdamW"])
def test_float64_stays_float64_under_inductor(name: str) -> None:
    """Learning rates and bias corrections included, which Inductor would hand to its kernels as float."""
    made = []
    for compiled in (True, False):
        torch.manual_seed(0)
        model = mlp().double()
        optimizer = OPTIMIZERS[name](model.parameters())
        step = gradsync_fx.optimize(plain_step) if compiled else plain_step
        for x, y in regression(1, 3)[0]:
            step(model, optimizer, x.double(), y.double())
        made.append([p.detach() for p in model.parameters()])
    for ours, eager in zip(*made, strict=True):
        torch.testing.assert_close(ours, eager, atol=1e-14, rtol=1e-13)


@pytest.mark.gloo
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=COMPILED)])
@pytest.mark.parametrize("sync_each_batch", [False, CAPTURED])
@pytest.mark.parametrize(
    ("gradients", "weight", "options"),
    [
        ((2.0, 3.0), 4096.0, {"reduction": "weighted"}),
        ((2.0, 3.0), 100_000.0, {"reduction": "weighted"}),
        ((2.0, 3.0), 1e-6, {"reduction": "weighted"}),
        ((20000.0, 24000.0), 1.0, {"skip_nonfinite": True}),
        ((40000.0, 60000.0), 1.0, {}),
    ],
)
def test_a_float16_wire_takes_what_their_mean_fits_into(
    gradients: tuple[float, float],
    weight: float,
    options: dict[str, Any],
    sync_each_batch: bool,
    backend: str,
    ranks: Ranks,
) -> None:
    given = {**options, "sync_each_batch": sync_each_batch, "backend": backend}
    mean = sum(gradients) / 2
    for found in ranks(precision.float16_wire, gradients, weight, given):
        assert found == pytest.approx(mean, rel=2e-3)


@pytest.mark.gloo
@pytest.mark.parametrize("sync_each_batch", [False, CAPTURED])
def test_an_infinite_gradient_on_one_rank_shows_on_both(
    sync_each_batch: bool, ranks: Ranks
) -> None:
    options = {"reduction": "weighted", "backend": "aot_eager", "sync_each_batch": sync_each_batch}
    for found in ranks(precision.float16_wire, (1.0, float("inf")), 4096.0, options):
        assert not math.isfinite(found)


@pytest.mark.gloo
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=COMPILED)])
@pytest.mark.parametrize("wrap", ["plain", "ddp"])
@pytest.mark.parametrize(
    ("options", "sums", "atol"),
    [
        ({}, torch.complex64, 1e-6),
        ({"accumulator_dtype": torch.float64}, torch.complex128, 1e-6),
        ({"accumulator_dtype": torch.bfloat16}, torch.complex64, 1e-2),
        ({"reduce_dtype": torch.bfloat16}, torch.complex64, 1e-2),
        ({"skip_nonfinite": True}, torch.complex64, 1e-6),
        pytest.param({"sync_each_batch": True}, torch.complex64, 1e-6, marks=pytest.mark.captured),
    ],
)
def test_complex_gradients_keep_their_imaginary_half(
    options: dict[str, Any],
    sums: torch.dtype,
    atol: float,
    wrap: str,
    backend: str,
    ranks: Ranks,
) -> None:
    one, two = ranks(precision.complex_numbers, wrap, {**options, "backend": backend})
    for ours, others, theirs in zip(one["ours"], two["ours"], one["whole"], strict=True):
        assert torch.equal(ours, others)
        torch.testing.assert_close(ours, theirs, atol=atol, rtol=0)
    assert one["equal"]
    if "w" in one["sums"]:
        assert one["sums"]["w"] is sums
