"""Effects of steps that run eagerly: what is right beyond the table's rows (test_effects.py), and what is refused."""

from __future__ import annotations

import copy
import gc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

import gradsync_fx
from tests.drive import quick
from tests.models import mlp
from tests.reference import Window, mse, regression
from tests.refusals import refused


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the step runs eagerly")
        yield
        # Steps that were refused leave windows open; they say so when they end, here and not in another test.
        warnings.simplefilter("ignore")
        gc.collect()


class Average:
    """Of the weights, with a count that the decay is made of. By `place` the count is a number or a tensor."""

    def __init__(self, model: nn.Module, place: str) -> None:
        self.slow = copy.deepcopy(model)
        self.count: Any = torch.zeros(()) if place == "tensor" else 0

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        self.count += 1
        decay = 1 - 1 / (1 + self.count)
        for slow, p in zip(self.slow.parameters(), model.parameters(), strict=True):
            slow.copy_(decay * slow + (1 - decay) * p)


class Weights:
    """torch's own, whose counter is a buffer."""

    def __init__(self, model: nn.Module) -> None:
        self.slow = AveragedModel(model, avg_fn=get_ema_avg_fn(0.9))

    def update(self, model: nn.Module) -> None:
        self.slow.update_parameters(model)


def step_of(after: Callable[..., object]) -> Callable[..., Tensor]:
    def step(model: nn.Module, average: Any, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        if loss.item() > 1e9:  # what no trace can follow
            raise OverflowError
        optimizer.step()
        optimizer.zero_grad()
        after(average, model)
        return loss

    return step


def trained(
    make: Callable[[nn.Module], Any],
    after: Callable[..., object] = lambda average, model: average.update(model),
    k: int = 2,
) -> tuple[Any, Any, gradsync_fx.OptimizedStep]:
    """Two windows, and one that `flush` ends; ours, eager's, and the step."""
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    ours, theirs = make(model), make(twin)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin)]
    step = quick(step_of(after), k, on_unsupported="eager")
    windows: list[Window] = [*regression(2, k), *regression(1, max(1, k - 1), seed=5)]
    for window in windows:
        for batch in window:
            step(model, ours, optimizers[0], *batch)
        for batch in window:
            (mse(twin, *batch) / len(window)).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        after(theirs, twin)
    step.flush()
    return ours, theirs, step


def same(ours: nn.Module, theirs: nn.Module) -> None:
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("make", [lambda m: Average(m, "tensor"), Weights])
def test_an_average_whose_count_is_a_tensor(make: Any, k: int) -> None:
    ours, theirs, _ = trained(make, k=k)
    same(ours.slow, theirs.slow)


def test_an_average_whose_count_is_a_number_is_refused() -> None:
    error = refused(
        gradsync_fx.CaptureError, "test_effects.py", trained, lambda m: Average(m, "number")
    )
    assert "'average.slow.0.weight'" in error.culprit
    assert "step.optimizer_step" in error.fix
    ours, theirs, _ = trained(lambda m: Average(m, "number"), k=1)
    same(ours.slow, theirs.slow)


def test_every_third_update_by_a_count_of_calls_is_refused() -> None:
    class Third(Average):
        def update(self, model: nn.Module) -> None:
            self.count += 1
            if self.count % 3 == 0:
                with torch.no_grad():
                    self.slow[0].weight.copy_(model[0].weight)  # type: ignore[index]

    with pytest.raises(gradsync_fx.CaptureError, match="in another way"):
        trained(lambda m: Third(m, "number"))


def test_the_advice_of_the_refusal() -> None:
    """A count of the updates, from outside of the step or from the step's own object."""
    held: list[gradsync_fx.OptimizedStep] = []

    class Counted(Average):
        @torch.no_grad()
        def update(self, model: nn.Module) -> None:
            decay = 1 - 1 / (2 + (held[0].optimizer_step if self.ours else self.count))
            self.count += 1
            for slow, p in zip(self.slow.parameters(), model.parameters(), strict=True):
                slow.lerp_(p, 1 - decay)

    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    averages = Counted(model, "number"), Counted(twin, "number")
    averages[0].ours, averages[1].ours = True, False  # type: ignore[attr-defined]
    mine, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    held.append(quick(step_of(lambda a, m: a.update(m)), 2, on_unsupported="eager"))
    for window in regression(3, 2):
        for batch in window:
            held[0](model, averages[0], mine, *batch)
            (mse(twin, *batch) / 2).backward()
        theirs.step()
        theirs.zero_grad()
        averages[1].update(twin)
    same(averages[0].slow, averages[1].slow)


def moved(average: Any, model: nn.Module) -> None:
    """Values that live between the operations: views, copies that are changed in place, a list of them."""
    with torch.no_grad():
        start = model[0].weight.detach().clone()  # type: ignore[index, operator]
        start[1:].mul_(0.5)
        rows = [row.t() for row in start.chunk(2)]
        torch._foreach_mul_(rows, 0.5)
        total = torch.zeros(16, 8)
        total += start
        average.slow[0].weight.add_(total)
        average.slow[0].bias.data = average.slow[0].bias.data + start.sum(1)
        model[2].weight.mul_(0.99)  # type: ignore[index, operator, union-attr]


def test_what_is_made_of_updated_parameters_is_made_again_where_no_call_ends_the_window() -> None:
    ours, theirs, _ = trained(lambda m: Average(m, "number"), moved)
    same(ours.slow, theirs.slow)


def test_a_value_that_was_read_on_the_host_cannot_be_made_again() -> None:
    def scaled(average: Any, model: nn.Module) -> None:
        with torch.no_grad():
            norm = model[0].weight.norm().item()  # type: ignore[index, operator, union-attr]
            average.slow[0].weight.copy_(model[0].weight / norm)  # type: ignore[index, operator]

    with pytest.raises(gradsync_fx.CaptureError, match="on the host") as caught:
        trained(lambda m: Average(m, "number"), scaled)
    assert "no item()" in caught.value.fix

    def tensors(average: Any, model: nn.Module) -> None:
        with torch.no_grad():
            weight = model[0].weight  # type: ignore[index]
            average.slow[0].weight.copy_(weight / weight.norm())  # type: ignore[operator, union-attr]

    ours, theirs, _ = trained(lambda m: Average(m, "number"), tensors)
    same(ours.slow, theirs.slow)


def clip_by_history(history: list[float], model: nn.Module) -> None:
    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm().item()
    history.append(norm)
    limit = sum(history) / len(history)
    if norm > 0.5 * limit:
        for p in model.parameters():
            p.grad.mul_(0.5 * limit / norm)


def test_a_clipping_by_values_that_were_read_from_gradients_is_refused() -> None:
    """On calls that end no window they are not those of the window."""

    def step(
        model: nn.Module, history: list[float], optimizer: Optimizer, x: Tensor, y: Tensor
    ) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        clip_by_history(history, model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def run(k: int) -> None:
        model, history = mlp(), list[float]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = quick(step, k, on_unsupported="eager")
        for batch in regression(1, 2)[0]:
            run(model, history, optimizer, *batch)

    error = refused(gradsync_fx.CaptureError, "test_effects.py", run, 2)
    assert "no item()" in error.fix
    run(1)


def test_a_compiled_model_stays_compiled() -> None:
    graphs: list[Any] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module)
        return module.forward

    torch.compiler.reset()
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)
    step = quick(step_of(lambda average, model: None), 2, on_unsupported="eager")
    for batch in regression(1, 2)[0]:
        step(compiled, None, optimizer, *batch)
    assert graphs
    assert step.optimizer_step == 1
