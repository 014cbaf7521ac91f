"""Threads of one process: steps of their own do not disturb each other; what would is refused."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.optim.compiled_mode import as_when_compiled
from tests.capture.test_patches import torchs_own
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import mse, regression
from tests.scenarios import threads
from tests.workers import Ranks


PATIENCE = 60.0


def trained(number: int, together: Callable[[], Any] = lambda: None, windows: int = 6) -> nn.Module:
    """A model of its own, some windows on. together: called before the first call."""
    generator = torch.Generator().manual_seed(number)
    model = mlp()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 4)
    optimizer = (torch.optim.SGD, torch.optim.AdamW)[number % 2](model.parameters(), 0.01)
    step = quick(plain_step, 2)
    batches = [batch for window in regression(windows, 2) for batch in window]
    together()
    for x, y in batches:
        step(model, optimizer, x, y)
    assert step.optimizer_step == windows
    assert step.pending == 0
    return model


@pytest.mark.captured
def test_two_steps_in_two_threads() -> None:
    """Captured at the same time, then run at the same time: each as if it were alone."""
    before = torchs_own()
    wanted = [trained(i) for i in range(4)]
    for _ in range(4):  # each time they meet elsewhere
        barrier = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(trained, i, partial(barrier.wait, PATIENCE)) for i in range(4)]
            found = [run.result(PATIENCE) for run in runs]
        for a, b in zip(found, wanted, strict=True):
            for p, q in zip(a.parameters(), b.parameters(), strict=True):
                assert torch.equal(p, q)
    assert torchs_own() == before


@pytest.mark.captured
def test_an_optimizer_of_another_thread_runs_eagerly_beside_a_trace() -> None:
    """Adam reads its counter as a number where nothing is compiled, and as a tensor of another precision elsewhere."""

    def stepped() -> Tensor:
        weight = nn.Parameter(torch.ones(3))
        optimizer = torch.optim.Adam([weight], 0.1)
        for i in range(3):
            weight.grad = torch.full((3,), 0.3 + i)
            optimizer.step()
        return weight

    wanted, optimizer = stepped(), torch.optim.Adam([nn.Parameter(torch.ones(1))])
    with as_when_compiled(optimizer), ThreadPoolExecutor(1) as pool:
        assert torch.compiler.is_compiling()
        assert not pool.submit(torch.compiler.is_compiling).result(PATIENCE)
        assert torch.equal(pool.submit(stepped).result(PATIENCE), wanted)


@pytest.mark.captured
def test_a_capture_beside_torchs_own_compiler() -> None:
    """torch.compile in one thread while steps are captured in others."""

    def compiled(together: Callable[[], Any]) -> list[Any]:
        together()
        found: list[Any] = []
        for i in range(4):
            model = mlp()
            loss = torch.compile(lambda x, m=model, i=i: m(x).sum() * i, backend="eager")
            loss(torch.ones(4, 8)).backward()
            assert all(p.grad is not None for p in model.parameters())
            found.append(model[0].weight.grad)
        return found

    barrier = threading.Barrier(3)
    with ThreadPoolExecutor(3) as pool:
        steps = [pool.submit(trained, i, lambda: barrier.wait(PATIENCE)) for i in range(2)]
        plain = pool.submit(compiled, lambda: barrier.wait(PATIENCE))
        for run in (*steps, plain):
            run.result(PATIENCE)


class Held:
    """A place that a thread can be kept in."""

    def __init__(self) -> None:
        self.entered, self.leave = threading.Event(), threading.Event()

    def wait(self) -> None:
        self.entered.set()
        assert self.leave.wait(PATIENCE)


@pytest.mark.captured
def test_one_step_in_two_threads_is_refused() -> None:
    held = Held()

    def backend(module: Any, inputs: Any) -> Any:
        def run(*args: Any) -> Any:
            held.wait()
            return module(*args)

        return run

    step = quick(plain_step, 4, backend=backend)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    with ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
        call = pool.submit(step, model, optimizer, x, y)
        assert held.entered.wait(PATIENCE)
        for use in (lambda: step(model, optimizer, x, y), step.flush, step.state_dict):
            with pytest.raises(
                gradsync_fx.WindowError, match="thread 'first_0' is inside of it"
            ) as caught:
                use()
            assert "step 'plain_step'" in str(caught.value)
            assert "a step for each thread" in caught.value.fix
        held.leave.set()
        call.result(PATIENCE)
    assert step.pending == 1
    step(model, optimizer, x, y)  # one after the other is fine
    assert step.pending == 2
    step.discard()


def held_step(held: Held) -> Callable[..., Tensor]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        if loss > 1e9:  # which keeps it from being captured
            loss = loss * 2
        loss.backward()
        held.wait()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def test_eager_steps_of_two_threads_are_refused_and_other_loops_are_not_touched() -> None:
    """The eager way answers torch's calls: in its own thread alone."""
    held, free = Held(), Held()
    free.leave.set()
    x, y = torch.randn(4, 8), torch.randn(4, 1)
    models = [mlp() for _ in range(3)]
    optimizers = [torch.optim.SGD(m.parameters(), 0.1) for m in models]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        steps = [quick(held_step(h), 2, on_unsupported="eager") for h in (held, free)]
        with ThreadPoolExecutor(1, thread_name_prefix="first") as pool:
            call = pool.submit(steps[0], models[0], optimizers[0], x, y)
            assert held.entered.wait(PATIENCE)
            with pytest.raises(gradsync_fx.WindowError, match="thread 'first_0' is inside of it"):
                steps[1](models[1], optimizers[1], x, y)
            assert steps[1].pending == 0
            # An ordinary loop of this thread.
            start = models[2][0].weight.detach().clone()
            mse(models[2], x, y).backward()
            norm = nn.utils.clip_grad_norm_(models[2].parameters(), 1.0)
            assert torch.isfinite(norm)
            optimizers[2].step()
            assert not torch.equal(models[2][0].weight, start)
            held.leave.set()
            call.result(PATIENCE)
        steps[1](models[1], optimizers[1], x, y)
    assert [s.pending for s in steps] == [1, 1]
    for s in steps:
        s.discard()


@pytest.mark.gloo
@pytest.mark.captured
def test_ddp_of_another_thread_reduces_while_a_step_is_traced(ranks: Ranks) -> None:
    assert ranks(threads.ddp_beside_a_trace) == [[0.5, 0.5]] * 2
