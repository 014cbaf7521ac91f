"""What goes wrong, or may look wrong, in a window that has begun: it is refused by name, or warned of.

An error leaves the window as it was. Steps that are refused before they begin are in test_errors.
"""

from __future__ import annotations

import copy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.optimizers import sgd
from tests.reference import assert_same_parameters, mse
from tests.refusals import refused


X, Y = torch.ones(4, 8), torch.ones(4, 1)


def test_skip_and_report_before_the_first_call() -> None:
    step = quick(plain_step, 2)
    refused(gradsync_fx.WindowError, "skip", step.skip)
    refused(gradsync_fx.WindowError, "report", step.report)


def test_another_optimizer_object() -> None:
    model = mlp()
    step = quick(plain_step, 2)
    step(model, sgd(model), X, Y)
    refused(gradsync_fx.WindowError, "optimizer SGD", step, model, sgd(model), X, Y)


def test_another_model() -> None:
    model, other = mlp(), mlp()
    step = quick(plain_step, 2)
    step(model, sgd(model), X, Y)
    refused(gradsync_fx.WindowError, "", step, other, sgd(other), X, Y)


def test_another_k() -> None:
    model = mlp()
    step = quick(plain_step, 4)
    step(model, sgd(model), X, Y)
    change = step.set_gradient_accumulation_steps
    error = refused(gradsync_fx.WindowError, "gradient_accumulation_steps", change, 8)
    assert "from 4 to 8 with 1 pending" in error.seen


def test_requires_grad_changed_inside_a_window() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 4)
    step(model, optimizer, X, Y)
    step(model, optimizer, X, Y)
    model[0].weight.requires_grad_(False)
    error = refused(gradsync_fx.WindowError, "", step, model, optimizer, X, Y)
    assert "'0.weight'" in str(error)


def test_requires_grad_changed_at_a_boundary_is_captured_anew() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    for _ in range(2):
        step(model, optimizer, X, Y)
    model[0].weight.requires_grad_(False)
    frozen, moving = model[0].weight.clone(), model[2].weight.detach().clone()
    for _ in range(2):
        step(model, optimizer, X, Y)
    assert torch.equal(model[0].weight, frozen)
    assert not torch.equal(model[2].weight, moving)


def test_an_error_in_the_step_leaves_the_window_as_it_was() -> None:
    """A batch of a wrong width is refused; the next right one goes on."""
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 3)
    step(model, optimizer, X, Y)
    sums = {name: t.clone() for name, t in step.gradients().items()}
    with pytest.raises(Exception, match=r"(?s)."):
        step(model, optimizer, torch.ones(4, 5), Y)
    assert step.pending == 1
    assert all(torch.equal(t, sums[name]) for name, t in step.gradients().items())
    step(model, optimizer, X, Y)
    step(model, optimizer, X, Y)
    assert step.sync_gradients


def test_a_gradient_of_the_users_is_dropped_with_a_warning() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    step(model, optimizer, X, Y)
    model[0].weight.grad = torch.full_like(model[0].weight, 100.0)
    before = step.gradients()["0.weight"].clone()
    with pytest.warns(gradsync_fx.GradSyncWarning, match=r"'0\.weight'"):
        step(model, optimizer, X, Y)
    assert model[0].weight.grad is None
    assert model[0].weight.abs().max() < 50
    assert before.abs().max() < 50


def test_a_gradient_left_before_the_first_call_is_dropped_with_a_warning() -> None:
    model, other = mlp(), mlp()
    other.load_state_dict(model.state_dict())
    mse(model, X, Y).backward()
    step = quick(plain_step, 1)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="dropped"):
        step(model, sgd(model), X, Y)
    plain_step(other, sgd(other), X, Y)
    assert_same_parameters(model, other)


def test_a_window_without_a_term_makes_no_update_and_warns() -> None:
    model = mlp()
    step = quick(plain_step, 2)
    step.prepare(model, sgd(model), X, Y)
    start = model[0].weight.detach().clone()
    step.skip()
    with pytest.warns(gradsync_fx.GradSyncWarning, match="no update"):
        step.skip()
    assert torch.equal(model[0].weight, start)
    assert (step.micro_step, step.optimizer_step, step.pending) == (2, 0, 0)
    assert not step.sync_gradients


@pytest.mark.captured
def test_an_ordinary_run_warns_of_nothing() -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            step(model, optimizer, X, Y)
        step(model, optimizer, X, Y)
        step.flush()


def test_a_step_that_is_dropped_with_an_open_window() -> None:
    model = mlp()
    step = quick(plain_step, 4)
    optimizer = sgd(model)
    for _ in range(3):
        step(model, optimizer, X, Y)
    with pytest.warns(gradsync_fx.GradSyncWarning, match="plain_step ended with 3 pending"):
        del step


@pytest.mark.parametrize("end", ["flush", "discard", "state_dict"])
def test_a_step_that_was_closed_or_saved_ends_quietly(end: str) -> None:
    model = mlp()
    optimizer = sgd(model)
    step = quick(plain_step, 4)
    step(model, optimizer, X, Y)
    getattr(step, end)()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del step


def test_the_interpreter_ends_with_an_open_window() -> None:
    program = (
        "import torch, gradsync_fx\n"
        "w = torch.nn.Parameter(torch.ones(()))\n"
        "o = torch.optim.SGD([w], 1.0)\n"
        "def step(x):\n"
        "    (w * x).backward()\n"
        "    o.step()\n"
        "s = gradsync_fx.optimize(step, gradient_accumulation_steps=3, backend='eager')\n"
        "s(torch.ones(()))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
        cwd=Path(__file__).parents[1],
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert "step ended with 1 pending micro-step in" in ended.stderr


@pytest.mark.captured
def test_branches_that_update_one_model_each() -> None:
    """No branch updates what both gave gradients; both ways out, followed, are the plain loop."""
    torch.manual_seed(0)
    models = nn.ModuleDict({"a": nn.Linear(2, 1), "b": nn.Linear(2, 1)})
    start = copy.deepcopy(models.state_dict())
    updates = {name: sgd(model) for name, model in models.items()}
    inputs = torch.randn(4, 3, 2)

    def one(name: str, x: Tensor) -> None:
        models[name](x).pow(2).mean().backward()
        updates[name].step()
        updates[name].zero_grad()

    def all_of_them(name: str, x: Tensor) -> None:
        models[name](x).pow(2).mean().backward()
        for update in updates.values():
            update.step()
            update.zero_grad()

    def trained() -> list[Tensor]:
        found = [p.detach().clone() for p in models.parameters()]
        models.load_state_dict(start)
        return found

    step = quick(one, 2)
    step("a", inputs[0])
    error = refused(gradsync_fx.WindowError, "the window", lambda: step("b", inputs[1]))
    assert "make a step of its own for each branch" in error.fix
    step.discard()
    models.load_state_dict(start)

    whole = quick(all_of_them, 2)
    for name, x in zip("abba", inputs, strict=True):
        whole(name, x)
    in_all = trained()
    for window in ((0, 1), (2, 3)):
        for call in window:
            (models["abba"[call]](inputs[call]).pow(2).mean() / 2).backward()
        for update in updates.values():
            update.step()
            update.zero_grad()
    for ours, plain in zip(in_all, trained(), strict=True):
        torch.testing.assert_close(ours, plain)

    apart = {name: quick(one, 2) for name in "ab"}
    for name, x in zip("abba", inputs, strict=True):
        apart[name](name, x)
    each = trained()
    for name, calls in (("a", (0, 3)), ("b", (1, 2))):
        for call in calls:
            (models[name](inputs[call]).pow(2).mean() / 2).backward()
        updates[name].step()
        updates[name].zero_grad()
    for ours, plain in zip(each, trained(), strict=True):
        torch.testing.assert_close(ours, plain)
