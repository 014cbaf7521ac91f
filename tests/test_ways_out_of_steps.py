"""The way out that an error of a step names, followed: first the error, then the step as advised, equal to eager."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

import gradsync_fx
from tests.drive import plain_step, quick, untraceable_step
from tests.models import mlp
from tests.own_optimizers import Own
from tests.reference import mse, regression
from tests.refusals import refused


pytestmark = [
    pytest.mark.captured,
    pytest.mark.filterwarnings("ignore::gradsync_fx.GradSyncWarning"),
]
Step = Callable[..., Any]
X, Y = torch.ones(4, 8), torch.ones(4, 1)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    """Windows that are left open here are not told in another file's tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


def sgd(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def wrong(step: Step, kind: Any = gradsync_fx.CaptureError, k: Any = 2, **options: Any) -> Any:
    """The error of a step's first call."""
    model = mlp()
    return refused(kind, "", quick(step, k, **options), model, sgd(model), X, Y)


def right(
    step: Step,
    between: Callable[[nn.Module], object] = lambda model: None,
    k: int = 2,
    loss: Any = mse,
    **options: Any,
) -> None:
    """The advised step: two windows, and one of fewer calls, are what plain accumulation makes of them."""
    torch.manual_seed(0)
    model = mlp()
    twin = copy.deepcopy(model)
    mine, theirs = sgd(model), sgd(twin)
    optimized = quick(step, k, **options)
    windows = [*regression(2, k), *([regression(1, k - 1, seed=5)[0]] if k > 1 else [])]
    for window in windows:
        for batch in window:
            optimized(model, mine, *batch)
            (loss(twin, *batch) / len(window)).backward()
        between(twin)
        theirs.step()
        theirs.zero_grad()
    optimized.flush()
    assert optimized.optimizer_step == len(windows)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def between(do: Callable[[nn.Module], object]) -> Step:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = mse(model, x, y)
        loss.backward()
        do(model)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def bound(step: Any, *more: Any) -> Step:
    """The step with these as its last arguments."""
    return lambda *given: step(*given, *more)


EAGER = {"on_unsupported": "eager"}


# Parts of a step that are missing


def test_backward_is_called() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        mse(model, x, y)
        optimizer.step()

    wrong(step, gradsync_fx.NoBackwardError)
    right(plain_step)


def test_the_loss_is_computed_by_the_model() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        other = x.clone().requires_grad_()
        (other * 2).sum().backward()
        optimizer.step()

    wrong(step, gradsync_fx.NoGradientError)
    right(plain_step)


def test_the_optimizer_is_built_from_this_model() -> None:
    model = mlp()
    kind = gradsync_fx.ForeignParameterError
    refused(kind, "", quick(plain_step, 2), model, sgd(mlp()), X, Y)
    right(plain_step)


def test_the_optimizer_is_reached_in_every_call() -> None:
    """Or the step itself says when."""

    def ends(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, end: bool) -> None:
        (mse(model, x, y) / 2).backward()
        if end:
            optimizer.step()
            optimizer.zero_grad()

    model = mlp()
    twin = copy.deepcopy(model)
    optimizer, theirs = sgd(model), sgd(twin)
    refused(gradsync_fx.NoOptimizerError, "", quick(ends, 2), model, optimizer, X, Y, False)
    right(plain_step)
    step = quick(ends, "manual", reduction="sum")
    for i in range(4):
        step(model, optimizer, X, Y, i % 2 == 1)
        ends(twin, theirs, X, Y, i % 2 == 1)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("mode", ["error", "eager"])
def test_the_weight_is_said(mode: str) -> None:
    def weighed(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        gradsync_fx.micro_batch_weight(len(x))
        plain = plain_step if mode == "error" else untraceable_step
        return plain(model, optimizer, x, y)

    plain = plain_step if mode == "error" else untraceable_step
    wrong(plain, reduction="weighted", on_unsupported=mode)
    right(weighed, reduction="weighted", on_unsupported=mode)


@pytest.mark.parametrize("mode", ["error", "eager"])
def test_weights_are_added_up_and_are_one_number(mode: str) -> None:
    plain = plain_step if mode == "error" else untraceable_step
    options = {"reduction": "weighted", "on_unsupported": mode}

    def with_weight(say: Callable[[Tensor], object]) -> Step:
        def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
            say(x)
            return plain(model, optimizer, x, y)

        return step

    def twice(x: Tensor) -> None:
        gradsync_fx.micro_batch_weight(1)
        gradsync_fx.micro_batch_weight(3)

    wrong(with_weight(twice), **options)
    right(with_weight(lambda x: gradsync_fx.micro_batch_weight(1 + 3)), **options)
    ones = torch.ones(4, 2)
    wrong(with_weight(lambda x: gradsync_fx.micro_batch_weight(ones)), **options)
    right(with_weight(lambda x: gradsync_fx.micro_batch_weight(ones.sum())), **options)


# Gradients


def test_a_hooks_work_is_done_between() -> None:
    model = mlp()
    model[0].weight.register_hook(lambda g: 0.5 * g)
    refused(gradsync_fx.CaptureError, "", quick(plain_step, 2), model, sgd(model), X, Y)

    def halve(model: Any) -> None:
        model[0].weight.grad.mul_(0.5)

    right(between(halve), halve)


def test_gradients_are_changed_through_grad() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, how: str) -> None:
        held = list(model.parameters())
        grads = torch.autograd.grad(mse(model, x, y), held)
        for p, g in zip(held, grads, strict=True):
            if how == "done first":
                g = 0.5 * g
            p.grad = g
            if how == "first name":
                g.mul_(0.5)
            if how == "through grad":
                p.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()

    def halve(model: nn.Module) -> None:
        for p in model.parameters():
            p.grad.mul_(0.5)  # type: ignore[union-attr]

    wrong(bound(step, "first name"))
    right(bound(step, "done first"), halve)
    right(bound(step, "through grad"), halve)


def test_gradients_are_read_after_the_last_backward() -> None:
    def step(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor, late: bool) -> None:
        mse(model, x, y).backward()
        if not late:
            scale = model[0].weight.grad.detach().norm()
            (mse(model, x, y) * scale).backward()
        else:
            mse(model, x, y).backward()
            model[0].weight.grad.mul_(model[0].weight.grad.norm())
        optimizer.step()
        optimizer.zero_grad()

    def scaled(model: Any) -> None:
        model[0].weight.grad.mul_(model[0].weight.grad.norm())

    wrong(bound(step, False), gradsync_fx.ReadBeforeBoundaryError)
    model = mlp()
    quick(bound(step, False), 1)(model, sgd(model), X, Y)
    right(bound(step, True), scaled, loss=lambda *a: 2 * mse(*a))


def test_an_eager_step_clips_after_the_last_backward() -> None:
    def step(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor, late: bool) -> None:
        loss = mse(model, x, y)
        if loss.item() > -1:
            loss.backward()
        if not late:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        mse(model, x, y).backward()
        if late:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    wrong(bound(step, False), gradsync_fx.ReadBeforeBoundaryError, **EAGER)
    right(bound(step, True), clip, loss=lambda *a: 2 * mse(*a), **EAGER)


def test_a_step_that_ends_windows_eagerly_uses_torchs_clipping() -> None:
    def step(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor, how: str) -> None:
        loss = mse(model, x, y)
        if how == "captured" or loss.item() > -1:
            loss.backward()
        if how == "torch's":
            nn.utils.clip_grad_value_(model.parameters(), 1e-3)
        else:
            for p in model.parameters():
                p.grad.clamp_(-1e-3, 1e-3)
        optimizer.step()
        optimizer.zero_grad()

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_value_(model.parameters(), 1e-3)

    wrong(bound(step, "by hand"), k="manual", **EAGER)
    right(bound(step, "torch's"), clip, **EAGER)
    right(bound(step, "captured"), clip)


@pytest.mark.parametrize("mode", ["error", "eager"])
def test_each_optimizers_parameters_are_clipped_apart(mode: str) -> None:
    def step(nets: Any, optimizers: Any, x: Tensor, y: Tensor, apart: bool) -> Tensor:
        loss = F.mse_loss(nets[1](nets[0](x)), y)
        if mode == "error" or loss.item() > -1:
            loss.backward()
        held = [list(n.parameters()) for n in nets]
        for some in held if apart else [[*held[0], *held[1]]]:
            nn.utils.clip_grad_norm_(some, 0.1)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss

    def made(k: Any, apart: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        nets = nn.ModuleList([mlp(), nn.Linear(1, 1)])
        optimizers = [sgd(n) for n in nets]
        ks = dict(zip(optimizers, k, strict=True)) if isinstance(k, tuple) else k
        return quick(bound(step, apart), ks, on_unsupported=mode), nets, optimizers

    refused(gradsync_fx.CaptureError, "", *made((1, 2), False), X, Y)
    for k, apart in (((1, 2), True), (2, False)):
        run, nets, optimizers = made(k, apart)
        before = copy.deepcopy(nets)
        for _ in range(2):
            run(nets, optimizers, X, Y)
        for p, q in zip(nets.parameters(), before.parameters(), strict=True):
            assert not torch.equal(p, q)


def test_a_mapping_holds_every_optimizer() -> None:
    nets = nn.ModuleList([mlp(), nn.Linear(1, 1)])
    optimizers = [sgd(n) for n in nets]

    def step(x: Tensor, y: Tensor) -> None:
        F.mse_loss(nets[1](nets[0](x)), y).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    refused(gradsync_fx.OptionError, "", quick(step, {optimizers[0]: 2}), X, Y)
    run = quick(step, {optimizers[0]: 2, optimizers[1]: 1})
    before = copy.deepcopy(nets)
    run(X, Y)
    assert torch.equal(nets[0][0].weight, before[0][0].weight)  # type: ignore[index]
    assert not torch.equal(nets[1].weight, before[1].weight)  # type: ignore[arg-type]


def test_sums_over_a_dense_embedding() -> None:
    def run(sparse: bool, mode: str) -> Tensor:
        torch.manual_seed(0)
        table = nn.Embedding(5, 3, sparse=sparse)

        def step(rows: Tensor) -> None:
            table(rows).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        optimizer = torch.optim.SGD(table.parameters(), lr=0.1)
        optimized = quick(step, 2, on_unsupported=mode)
        for _ in range(2):
            optimized(torch.tensor([1, 3]))
        return table.weight.detach()

    refused(gradsync_fx.CaptureError, "", run, True, "error")
    torch.testing.assert_close(run(False, "error"), run(True, "eager"))


# Updates


def test_hyper_parameters_are_set_ahead_or_by_a_scheduler() -> None:
    def sets(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        optimizer.param_groups[0]["lr"] = 0.05
        plain_step(model, optimizer, x, y)

    wrong(sets)
    for how in ("ahead", "scheduler"):
        scheduled = how == "scheduler"
        model = mlp()
        start = copy.deepcopy(model)
        optimizer = sgd(model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: 0.5**n)

        def step(
            model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, scheduler: Any
        ) -> None:
            plain_step(model, optimizer, x, y)
            if scheduler is not None:
                scheduler.step()

        if not scheduled:
            optimizer.param_groups[0]["lr"] = 0.05
        quick(step, 1)(model, optimizer, X, Y, scheduler if scheduled else None)
        mse(start, X, Y).backward()
        rate = 0.1 if scheduled else 0.05
        for p, q in zip(model.parameters(), start.parameters(), strict=True):
            torch.testing.assert_close(p, q - rate * q.grad)  # type: ignore[operator]
        assert optimizer.param_groups[0]["lr"] == 0.05


def test_each_update_is_a_step_of_its_own() -> None:
    def twice(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        untraceable_step(model, optimizer, x, y)
        untraceable_step(model, optimizer, x, y)

    wrong(twice, **EAGER)
    right(untraceable_step, **EAGER)


class Hidden:
    """An object that makes up its attributes: no search finds what they are."""

    def __getattr__(self, name: str) -> Any:
        return _HIDDEN[name]()


_HIDDEN: dict[str, Any] = {}


def test_an_optimizer_is_given_as_an_argument() -> None:
    def step(model: nn.Module, hidden: Any, x: Tensor, y: Tensor) -> None:
        untraceable_step(model, hidden.optimizer, x, y)

    model = mlp()
    _HIDDEN["optimizer"] = iter([sgd(model)] * 9).__next__
    refused(gradsync_fx.CaptureError, "", quick(step, 2, **EAGER), model, Hidden(), X, Y)
    right(untraceable_step, **EAGER)


def test_an_argument_is_set_on_the_optimizer_ahead() -> None:
    def gives(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        loss = mse(model, x, y)
        if loss.device.type == "cpu":
            loss.backward()
        optimizer.step(factor=loss.detach())
        optimizer.zero_grad()

    model = mlp()
    own = Own(model.parameters())
    refused(gradsync_fx.CaptureError, "", quick(gives, 1), model, own, X, Y)
    twin = copy.deepcopy(model)
    quick(gives, 1, **EAGER)(model, own, X, Y)
    gives(twin, Own(twin.parameters()), X, Y)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_what_an_update_tells_is_kept_on_the_optimizer() -> None:
    class Tells(Own):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            super().step()
            self.told = {"updates": 1}
            return self.told

    def uses(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        mse(model, x, y).backward()
        told = optimizer.step()
        optimizer.zero_grad()
        return told

    model = mlp()
    optimizer = Tells(model.parameters())
    refused(gradsync_fx.UpdateError, "", quick(uses, 1), model, optimizer, X, Y)
    quick(plain_step, 1)(model, optimizer, X, Y)
    assert optimizer.told == {"updates": 1}
    assert quick(uses, 1, **EAGER)(model, optimizer, X, Y) == {"updates": 1}


def test_an_optimizer_with_a_closure() -> None:
    """One that needs none does without; LBFGS trains in a loop of its own."""

    def closed(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Any:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = mse(model, x, y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    model = mlp()
    lbfgs = torch.optim.LBFGS(model.parameters())
    refused(gradsync_fx.CaptureError, "", quick(closed, 2), model, lbfgs, X, Y)
    assert closed(model, lbfgs, X, Y) > mse(model, X, Y)
    right(plain_step)


def test_a_step_without_a_scaler() -> None:
    scaler = torch.amp.GradScaler("cpu")

    def scaled(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        scaler.scale(mse(model, x, y)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    wrong(scaled)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    right(scaled)

    def bfloat16(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mse(model, x, y)

    def low(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        bfloat16(model, x, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    right(low, loss=bfloat16)

    def by_constant(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        (mse(model, x, y) * 1024).backward()
        for p in model.parameters():
            p.grad.div_(1024)  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()

    right(by_constant, skip_nonfinite=True)


def test_a_step_of_each_part_where_a_loss_needs_an_update() -> None:
    def both(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x, y)
        plain_step(model, optimizer, x, y)

    wrong(both, skip_nonfinite=True)
    model = mlp()
    quick(both, 1)(model, sgd(model), X, Y)
    right(plain_step, skip_nonfinite=True)


def test_a_count_in_an_attribute_or_outside() -> None:
    class Count:
        n = 0

    def average(slow: Any, model: nn.Module, count: int) -> None:
        with torch.no_grad():
            for p, q in zip(slow.parameters(), model.parameters(), strict=True):
                p.lerp_(q, 1 / (1 + count))

    def run(how: str) -> nn.Module:
        torch.manual_seed(0)
        model = mlp()
        slow, held, count = copy.deepcopy(model), {"n": 0}, Count()

        def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
            plain_step(model, optimizer, x, y)
            if how == "dict":
                held["n"] += 1
                average(slow, model, held["n"])
            if how == "attribute":
                count.n += 1
                average(slow, model, count.n)

        stepped, optimizer = quick(step, 2), sgd(model)
        for batch in (b for window in regression(2, 2) for b in window):
            stepped(model, optimizer, *batch)
            if how == "outside" and stepped.sync_gradients:
                count.n += 1
                average(slow, model, count.n)
        return slow

    refused(gradsync_fx.CaptureError, "", run, "dict")
    for p, q in zip(run("attribute").parameters(), run("outside").parameters(), strict=True):
        torch.testing.assert_close(p, q)


# What a trace cannot hold


def test_an_untraceable_line_is_left_out_or_the_step_runs_eagerly() -> None:
    wrong(untraceable_step)
    right(untraceable_step, **EAGER)
    right(plain_step)


def test_memory_is_written_into() -> None:
    def step(model: Any, optimizer: Optimizer, x: Tensor, y: Tensor, how: str) -> None:
        plain_step(model, optimizer, x, y)
        if how == "other":
            model[0].weight.data = model[0].weight.data * 0.5
        if how == "data":
            model[0].weight.data.copy_(model[0].weight.data * 0.5)
        if how == "no_grad":
            with torch.no_grad():
                model[0].weight.copy_(model[0].weight * 0.5)

    def run(how: str) -> Tensor:
        torch.manual_seed(0)
        model = mlp()
        quick(bound(step, how), 1)(model, sgd(model), X, Y)
        return model[0].weight.detach()

    def shares(model: nn.Module, optimizer: Optimizer, held: Tensor, x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x, y)
        held.data = x

    def copies(model: nn.Module, optimizer: Optimizer, held: Tensor, x: Tensor, y: Tensor) -> None:
        plain_step(model, optimizer, x, y)
        held.data.copy_(x)

    model, held = mlp(), torch.zeros(4, 8)
    refused(gradsync_fx.CaptureError, "", quick(shares, 1), model, sgd(model), held, X, Y)
    quick(copies, 1)(model, sgd(model), held, X, Y)
    assert torch.equal(held, X)
    torch.testing.assert_close(run("data"), run("none") * 0.5)
    torch.testing.assert_close(run("no_grad"), run("none") * 0.5)


def limit() -> float:
    """What no trace can follow."""
    return len(pickle.dumps("limit")) * 1e-3


def keeps_small(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-limit(), limit())


LIMIT = limit()


def keeps_small_traced(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.clamp_(-LIMIT, LIMIT)


def test_a_helper_is_traced_or_called_outside() -> None:
    def with_helper(helper: Any) -> Step:
        def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
            plain_step(model, optimizer, x, y)
            helper(model)

        return step

    def run(step: Step, outside: bool = False, **options: Any) -> list[Tensor]:
        torch.manual_seed(0)
        model = mlp()
        stepped, optimizer = quick(step, 2, **options), sgd(model)
        for window in regression(2, 2):
            for batch in window:
                stepped(model, optimizer, *batch)
                if outside and stepped.sync_gradients:
                    keeps_small(model)
        return list(model.parameters())

    refused(gradsync_fx.CaptureError, "", run, with_helper(keeps_small))
    wanted = run(plain_step, True)
    for found in (run(with_helper(keeps_small_traced)), run(with_helper(keeps_small), **EAGER)):
        for p, q in zip(found, wanted, strict=True):
            torch.testing.assert_close(p, q)


def test_checkpoints_of_the_other_kind() -> None:
    def with_checkpoints(reentrant: bool) -> Step:
        def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
            out = checkpoint(model, x, use_reentrant=reentrant)
            F.mse_loss(out, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    wrong(with_checkpoints(True))
    right(with_checkpoints(False))


def test_recurrent_layers_in_a_step_that_runs_eagerly() -> None:
    net = nn.LSTM(3, 4, num_layers=2, dropout=0.5)

    def step(net: nn.Module, optimizer: Any, x: Tensor) -> None:
        net(x)[0].sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(mode: str) -> list[Tensor]:
        torch.manual_seed(0)
        mine = copy.deepcopy(net)
        quick(step, 1, on_unsupported=mode)(mine, sgd(mine), torch.ones(2, 1, 3))
        return list(mine.parameters())

    refused(gradsync_fx.CaptureError, "", run, "error")
    torch.manual_seed(0)
    twin = copy.deepcopy(net)
    step(twin, sgd(twin), torch.ones(2, 1, 3))
    for p, q in zip(run("eager"), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("draw", ["rand", "normal", "permutation", "beta"])
def test_numbers_of_numpy(draw: str) -> None:
    drawn = {
        "rand": lambda: np.random.rand(4, 1),
        "normal": lambda: np.random.normal(size=(4, 1)),
        "permutation": lambda: np.random.permutation(4)[:, None],
        "beta": lambda: np.array(np.random.beta(0.2, 0.2)),
    }[draw]

    def noisy(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> None:
        with_noise(model, optimizer, x, y, torch.from_numpy(drawn()).float())

    def with_noise(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor, noise: Tensor) -> None:
        F.mse_loss(model(x) * noise, y).backward()
        optimizer.step()
        optimizer.zero_grad()

    def run(step: Step, **options: Any) -> list[Tensor]:
        np.random.seed(3)
        torch.manual_seed(0)
        model = mlp()
        stepped, optimizer = quick(step, 2, **options), sgd(model)
        for window in regression(2, 2):
            for batch in window:
                given = () if step is noisy else (torch.from_numpy(drawn()).float(),)
                stepped(model, optimizer, *batch, *given)
        return list(model.parameters())

    error = refused(gradsync_fx.CaptureError, f"np.random.{draw}", run, noisy)
    assert "NumPy's generator" in error.seen
    for p, q in zip(run(with_noise), run(noisy, **EAGER), strict=True):
        torch.testing.assert_close(p, q)
