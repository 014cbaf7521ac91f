"""Calls in a step that compute nothing for it: they run after the program, with eager's values, and cost no trace."""

from __future__ import annotations

import io
import logging
import math
import pickle
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tqdm import tqdm

import gradsync_fx
from tests.drive import checked_step, quick
from tests.models import mlp
from tests.reference import mse, regression
from tests.refusals import refused


log = logging.getLogger(__name__)
Say = Callable[[nn.Module, Tensor, Tensor], object]


def fresh() -> nn.Module:
    torch.manual_seed(0)
    return mlp()


def losses_of(step: Callable[..., object], calls: int = 6) -> list[float]:
    """Loss of each call before its update, from eager PyTorch with windows of 2."""
    model, found = fresh(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, ((x, y),) in enumerate(regression(calls, 1)):
        loss = mse(model, x, y)
        (loss / 2).backward()
        found.append(loss.item())
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    return found


def run(say: Say, calls: int = 6) -> gradsync_fx.OptimizedStep:
    """Six calls, windows of 2, of a step that calls `say` between its update and its return."""

    def whole(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        out = model(x)
        loss = torch.nn.functional.mse_loss(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        result = say(model, out, loss)
        return loss if result is None else result

    step, model = quick(whole, 2), fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    results = [step(model, optimizer, x, y) for ((x, y),) in regression(calls, 1)]
    expected = losses_of(whole, calls)
    assert [float(r["loss"] if isinstance(r, dict) else r) for r in results] == expected
    assert step.optimizer_step == calls // 2
    assert step.compile_count == 2
    return step


def only_moved(step: gradsync_fx.OptimizedStep, *names: str) -> None:
    """The report says what was moved, with its line, and nothing else."""
    moved = step.report().moved
    assert [text.split(" at ")[0] for text in moved] == list(names)
    assert all(f"{__file__}:" in text for text in moved)


def test_numbers_of_the_loss() -> None:
    run(lambda model, out, loss: loss.item())
    run(lambda model, out, loss: float(loss))
    run(lambda model, out, loss: {"loss": loss.item(), "double": 2 * loss.item()})


def test_print(capsys: pytest.CaptureFixture[str]) -> None:
    def say(model: nn.Module, out: Tensor, loss: Tensor) -> None:
        print(f"loss {loss.item():.4f}", out.shape[0], sep="|", flush=True)

    step = run(say)
    expected = "".join(f"loss {v:.4f}|4\n" for v in losses_of(say))
    assert capsys.readouterr().out == expected
    only_moved(step, "print")


def test_print_of_a_tensor_with_a_gradient(capsys: pytest.CaptureFixture[str]) -> None:
    def say(model: nn.Module, out: Tensor, loss: Tensor) -> None:
        print(loss)

    run(say)
    assert capsys.readouterr().out == "".join(f"{torch.tensor(v)!r}\n" for v in losses_of(say))


def test_loggers(caplog: pytest.LogCaptureFixture) -> None:
    def say(model: nn.Module, out: Tensor, loss: Tensor) -> None:
        log.info("loss %.4f", loss.item())
        log.debug("unseen")

    with caplog.at_level(logging.INFO, logger=__name__):
        step = run(say)
    mine = [r.getMessage() for r in caplog.records if r.name == __name__]
    assert mine == [f"loss {v:.4f}" for v in losses_of(say)]
    only_moved(step, "logger.info", "logger.debug")


def test_a_progress_bar() -> None:
    text = io.StringIO()
    bar = tqdm(total=6, file=text, mininterval=0)

    def say(model: nn.Module, out: Tensor, loss: Tensor) -> None:
        bar.update(1)
        bar.set_postfix(loss=f"{loss.item():.4f}")

    step = run(say)
    bar.close()
    assert bar.n == 6
    assert "6/6" in text.getvalue()
    assert f"loss={losses_of(say)[-1]:.4f}" in text.getvalue()
    only_moved(step, "tqdm.update", "tqdm.set_postfix")


class Accuracy:
    """A metric that no trace can follow: numpy, and a file."""

    def __init__(self) -> None:
        self.seen: list[float] = []
        self.tags = io.StringIO()

    def update(self, predictions: Tensor, *, tag: str) -> None:
        self.seen.append(float(predictions.numpy().sum()))
        self.tags.write(tag)


def test_a_metric_that_is_fed_detached_tensors() -> None:
    metric, plain = Accuracy(), Accuracy()

    def say(model: nn.Module, out: Tensor, loss: Tensor) -> None:
        metric.update(out.detach(), tag="x")

    step = run(say)
    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for i, ((x, y),) in enumerate(regression(6, 1)):
        out = model(x)
        (torch.nn.functional.mse_loss(out, y) / 2).backward()
        plain.update(out.detach(), tag="x")
        if i % 2:
            optimizer.step()
            optimizer.zero_grad()
    assert metric.seen == plain.seen
    assert metric.tags.getvalue() == "x" * 6
    only_moved(step, "Accuracy.update")


def test_a_call_that_may_need_a_gradient_is_not_moved() -> None:
    """What is put aside is given values without one."""
    seen: list[bytes] = []

    def keep(value: Tensor) -> None:
        seen.append(pickle.dumps(value))
        value.backward()

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        keep(loss)
        optimizer.step()

    model = fresh()
    arguments = (model, torch.optim.SGD(model.parameters()), *regression(1, 1)[0][0])
    error = refused(gradsync_fx.CaptureError, "test_deferred_calls.py:", quick(step, 2), *arguments)
    assert 'on_unsupported="eager"' in error.fix
    assert seen == []


def test_a_list_of_losses_costs_no_trace() -> None:
    losses: list[float] = []
    recent: deque[Tensor] = deque(maxlen=2)

    def say(model: nn.Module, out: Tensor, loss: Tensor) -> None:
        losses.append(loss.item())
        recent.append(loss.detach())

    traces = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    step = run(say)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == traces + 1
    assert losses == losses_of(say)
    assert [float(v) for v in recent] == losses[-2:]
    only_moved(step, "losses.append", "recent.append")


def test_a_list_that_the_step_also_reads() -> None:
    """Eager's values count more than a trace for each length."""
    losses: list[float] = []

    def whole(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        return sum(losses) / len(losses)

    step, model = quick(whole, 2), fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    means = [step(model, optimizer, x, y) for ((x, y),) in regression(4, 1)]
    expected = losses_of(whole, 4)
    assert losses == expected
    assert means == pytest.approx([sum(expected[: i + 1]) / (i + 1) for i in range(4)])
    assert step.report().moved == ()


def test_an_average_meter_settles() -> None:
    class Meter:
        def __init__(self) -> None:
            self.total, self.count = 0.0, 0

        def update(self, value: float, n: int) -> None:
            self.total, self.count = self.total + value * n, self.count + n

    meter = Meter()

    def whole(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        meter.update(loss.item(), len(x))

    step, model = quick(whole, 2), fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    counts = []
    for ((x, y),) in regression(8, 1):
        step(model, optimizer, x, y)
        counts.append(step.compile_count)
    assert meter.count == 32
    assert meter.total == pytest.approx(4 * sum(losses_of(whole, 8)))
    # The second value of a Python number makes it dynamic, as in torch.compile; nothing is compiled after that.
    assert counts[3:] == [counts[3]] * 5


def test_clocks_give_nan() -> None:
    def say(model: nn.Module, out: Tensor, loss: Tensor) -> dict[str, Any]:
        start = time.perf_counter()
        return {"loss": loss, "seconds": time.perf_counter() - start, "now": time.time()}

    step = run(say)
    only_moved(step, "time.perf_counter", "time.perf_counter", "time.time")


def test_the_value_of_a_clock() -> None:
    def whole(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> float:
        start = time.time()
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        return time.time() - start

    model = fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    assert math.isnan(quick(whole)(model, optimizer, *regression(1, 1)[0][0]))


def test_asserts_on_shapes_and_values() -> None:
    step, model = quick(checked_step, 2), fresh()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    data = regression(3, 1)
    for ((x, y),) in data:
        step(model, optimizer, x, y)
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(AssertionError, match="not finite"):
        step(model, optimizer, data[0][0][0] * math.inf, data[0][0][1])
    assert all(torch.equal(a, p) for a, p in zip(before, model.parameters(), strict=True))
    assert step.pending == 1
    with pytest.raises(AssertionError, match="another batch"):
        step(model, optimizer, torch.ones(3, 8), torch.ones(3, 1))
