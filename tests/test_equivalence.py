"""One rank: a window of an optimized step is what eager accumulation, and the joined batch, make of it.

Here are the windows themselves: their arithmetic to the last bit, where they end, how long they are, and that it does
not matter which compiler runs them. Neighbours ask the same of one ingredient of a step each: test_optimizers,
test_schedules, test_gradients, test_forms_of_steps, test_buffers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import drive, plain_step, quick, step_of
from tests.eagerly import programs
from tests.models import Lin, TinyGPT, mlp
from tests.optimizers import sgd
from tests.reference import (
    Window,
    accumulation,
    assert_same,
    assert_same_parameters,
    assert_same_tensors,
    joined,
    regression,
    twins,
)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_lin_is_exact(k: int) -> None:
    """w - mean(x) after each window, w itself times x as the loss: integers, to the last bit."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), k)
    wanted = torch.zeros(())
    number = 0
    for _ in range(6):
        total = 0
        for i in range(k):
            number = (number * 7 + 3) % 23
            loss = step(model, optimizer, torch.tensor(float(number)))
            assert loss.item() == (wanted * number).item()
            total += number
            assert step.sync_gradients is (i + 1 == k)
            if i + 1 < k:
                assert model.w.item() == wanted.item()
        wanted = wanted - torch.tensor(float(total)) / k
        assert model.w.item() == wanted.item()


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_boundary_is_every_kth_call(k: int) -> None:
    model = Lin()
    optimizer = sgd(model)
    step = quick(step_of(lambda model, x: model(x)), k)
    closed = []
    for _ in range(3 * k):
        step(model, optimizer, torch.tensor(1.0))
        closed.append(step.sync_gradients)
    assert closed == ([False] * (k - 1) + [True]) * 3


def test_no_micro_step_is_lost() -> None:
    """x = 1, 2, 4 and k = 3: 7/3, not the last alone."""
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 3)
    for x in (1.0, 2.0, 4.0):
        step(model, optimizer, torch.tensor(x))
    assert model.w.item() == -(torch.tensor(7.0) / 3).item()


def test_sum_reduction_is_exact() -> None:
    model = Lin()
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 3, reduction="sum")
    for x in (1.0, 2.0, 4.0):
        step(model, optimizer, torch.tensor(x))
    assert model.w.item() == -7.0


def test_low_precision_parameters_are_summed_in_float32() -> None:
    """256 + 1 + 1 is 256 in bfloat16, 258 when the running sum is float32."""
    model = Lin().to(torch.bfloat16)
    optimizer = sgd(model, 1.0)
    step = quick(step_of(lambda model, x: model(x)), 3, reduction="sum")
    for x in (256.0, 1.0, 1.0):
        step(model, optimizer, torch.tensor(x, dtype=torch.bfloat16))
    assert model.w.item() == -258.0


def test_gradients_show_the_running_sum() -> None:
    model = Lin()
    optimizer = sgd(model)
    step = quick(step_of(lambda model, x: model(x)), 3)
    step(model, optimizer, torch.tensor(2.0))
    step(model, optimizer, torch.tensor(5.0))
    assert step.gradients()["w"].item() == 7.0
    step(model, optimizer, torch.tensor(1.0))
    assert step.gradients()["w"].item() == 0.0


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_sgd_equals_the_joined_batch(k: int) -> None:
    """The first window apart: 1e-6 after one update. Five more follow it."""
    ours, eager, whole = twins(mlp(), 3)
    data = regression(6, k)
    mine = drive(quick(plain_step, k), ours, sgd(ours), data)
    theirs = accumulation(eager, sgd(eager), data)
    batch = joined(whole, sgd(whole), [data])
    for name, tensor in mine.updates[0].items():
        torch.testing.assert_close(tensor, batch.updates[0][name], atol=1e-6, rtol=0)
        torch.testing.assert_close(tensor, theirs.updates[0][name], atol=1e-6, rtol=0)
    assert_same(mine, theirs, atol=1e-6)
    assert_same_tensors(mine, batch, atol=1e-5)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_adamw_after_20_updates(k: int) -> None:
    ours, eager, whole = twins(mlp(), 3)
    data = regression(20, k)

    def make(model: nn.Module) -> Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    step = quick(plain_step, k)
    mine = drive(step, ours, make(ours), data)
    assert_same(mine, accumulation(eager, make(eager), data), atol=1e-5)
    batch = joined(whole, make(whole), [data])
    assert_same_tensors(mine, batch, atol=1e-5)
    assert step.compile_count == programs(min(k, 2))


def test_another_batch_size_is_another_capture_in_the_same_window() -> None:
    ours, eager = twins(mlp())
    data = regression(1, 1, batch=4)[0] + regression(1, 1, batch=6)[0]
    windows = [data, data, data]
    mine = drive(quick(plain_step, 2), ours, sgd(ours), windows)
    assert_same(mine, accumulation(eager, sgd(eager), windows), atol=1e-6)


def test_evaluation_inside_a_window_changes_nothing() -> None:
    ours, eager = twins(mlp())
    optimizer, reference = sgd(ours), sgd(eager)
    step = quick(plain_step, 4)
    (window,) = regression(1, 4)
    for i, batch in enumerate(window):
        step(ours, optimizer, *batch)
        if i == 1:
            before = {name: t.clone() for name, t in step.gradients().items()}
            ours.eval()
            with torch.no_grad():
                ours(torch.randn(7, 8))
            ours.train()
            assert all(torch.equal(t, before[name]) for name, t in step.gradients().items())
            assert step.pending == 2
    accumulation(eager, reference, [window])
    assert_same_parameters(ours, eager)


def tokens(windows: int, k: int) -> list[Window]:
    source = torch.Generator().manual_seed(5)
    return [
        [(torch.randint(17, (2, 9), generator=source),) for _ in range(k)] for _ in range(windows)
    ]


def next_token(model: nn.Module, text: Tensor) -> Tensor:
    logits = model(text[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())


def test_gpt_with_tied_weights() -> None:
    """SGD: the gradient of attention's key bias is zero but for rounding, and Adam would blow the rounding up."""
    ours, eager = twins(TinyGPT())
    data = tokens(5, 3)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    reference = torch.optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    step = quick(step_of(next_token), 3)
    mine = drive(step, ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data, next_token), atol=1e-5)
    assert step.gradients().keys() == {name for name, _ in ours.named_parameters()}
    assert all(
        not torch.equal(mine.updates[0][name], mine.updates[1][name]) for name in step.gradients()
    )


def test_many_steps_in_one_process() -> None:
    """More optimized steps than torch allows captures of one function: they do not share that limit."""
    for n in range(1, 20):
        model = Lin()
        optimizer = sgd(model, 1.0)
        step = quick(step_of(lambda model, x: model(x)), 1)
        step(model, optimizer, torch.tensor(float(n)))
        assert model.w.item() == -n


@pytest.mark.inductor
def test_inductor_computes_the_same() -> None:
    ours, eager = twins(mlp())
    data = regression(5, 2)
    step = quick(plain_step, 2, backend="inductor")
    optimizer = torch.optim.AdamW(ours.parameters(), lr=1e-3)
    reference = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    mine = drive(step, ours, optimizer, data)
    assert_same(mine, accumulation(eager, reference, data), atol=1e-5)
    assert step.compile_count == programs(2)


@pytest.mark.parametrize("backend", ["eager", lambda module, inputs: module.forward])
def test_other_backends_compute_the_same(backend: Any) -> None:
    ours, eager = twins(mlp())
    data = regression(5, 2)
    mine = drive(quick(plain_step, 2, backend=backend), ours, sgd(ours), data)
    assert_same(mine, accumulation(eager, sgd(eager), data), atol=1e-6)
