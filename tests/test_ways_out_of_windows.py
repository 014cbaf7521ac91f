"""The way out that an error of a window, a state, an argument or a check names, followed: it works."""

from __future__ import annotations

import copy
import gc
import io
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx import OptionError, StateError, WindowError
from tests.drive import plain_step, quick, untraceable_step
from tests.models import mlp
from tests.reference import mse
from tests.refusals import refused


pytestmark = [
    pytest.mark.captured,
    pytest.mark.filterwarnings("ignore::gradsync_fx.GradSyncWarning"),
]
X, Y = torch.ones(4, 8), torch.ones(4, 1)


@pytest.fixture(scope="module", autouse=True)
def _ended() -> Iterator[None]:
    """Windows that are left open here are not told in another file's tests."""
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        gc.collect()


class Held:
    """A model with its optimizer and its step."""

    def __init__(self, k: Any = 2, function: Any = plain_step, **options: Any) -> None:
        self.model = mlp()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.step = quick(function, k, **options)

    def call(self, times: int = 1) -> None:
        for _ in range(times):
            self.step(self.model, self.optimizer, X, Y)

    def updates(self, calls: int, updates: int = 1) -> None:
        """These calls make so many updates, which move the model."""
        before, start = self.step.optimizer_step, self.model[0].bias.detach().clone()
        self.call(calls)
        assert self.step.optimizer_step == before + updates
        assert updates == 0 or not torch.equal(self.model[0].bias, start)


# Windows


@pytest.mark.parametrize("way", ["flush", "discard", "boundary"])
def test_a_change_of_requires_grad(way: str) -> None:
    held = Held(2)
    held.call()
    held.model[0].weight.requires_grad_(False)
    refused(WindowError, "", held.call)
    if way == "boundary":
        held.model[0].weight.requires_grad_(True)
        held.call()
        held.model[0].weight.requires_grad_(False)
    else:
        getattr(held.step, way)()
    held.updates(2)


@pytest.mark.parametrize("way", ["flush", "discard"])
def test_a_change_of_k(way: str) -> None:
    held = Held(2)
    held.call()
    refused(WindowError, "", held.step.set_gradient_accumulation_steps, 3)
    getattr(held.step, way)()
    held.step.set_gradient_accumulation_steps(3)
    held.updates(3)


def test_another_kind_of_k_is_a_step_of_its_own() -> None:
    held = Held(2)
    refused(WindowError, "", held.step.set_gradient_accumulation_steps, {held.optimizer: 2})
    held.step = quick(plain_step, {held.optimizer: 2})
    held.updates(2)


def test_another_model_has_a_step_of_its_own() -> None:
    held, other = Held(2), Held(2)
    held.call()
    refused(WindowError, "", held.step, other.model, other.optimizer, X, Y)
    other.updates(2)
    held.updates(1)


def test_a_call_is_left_out_where_the_step_ends_windows() -> None:
    def ends(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, end: bool) -> None:
        mse(model, x, y).backward()
        if end:
            optimizer.step()
            optimizer.zero_grad()

    held = Held("manual", ends)
    held.step(held.model, held.optimizer, X, Y, True)
    refused(WindowError, "skip", held.step.skip)
    held.step(held.model, held.optimizer, X, Y, True)
    assert held.step.optimizer_step == 2


def test_a_capture_comes_before_a_skip_and_a_report() -> None:
    held = Held(2)
    refused(WindowError, "skip", held.step.skip)
    refused(WindowError, "report", held.step.report)
    held.step.prepare(held.model, held.optimizer, X, Y)
    held.step.skip()
    assert "boundary" in str(held.step.report())
    held.updates(1)


def test_windows_of_two_optimizers_reach_both_in_every_call() -> None:
    body, head = mlp(), nn.Linear(1, 1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (body, head)]

    def step(x: Tensor, y: Tensor, every: bool) -> None:
        loss = mse(nn.Sequential(body, head), x, y)
        if loss.item() > -1:
            loss.backward()
        for i, optimizer in enumerate(optimizers):
            if every or i == 0:
                optimizer.step()
                optimizer.zero_grad()

    run = quick(step, {optimizers[0]: 2, optimizers[1]: 1}, on_unsupported="eager")
    refused(gradsync_fx.NoOptimizerError, "", run, X, Y, False)
    run = quick(step, {optimizers[0]: 2, optimizers[1]: 1}, on_unsupported="eager")
    start = head.weight.detach().clone()
    run(X, Y, True)
    assert not torch.equal(head.weight, start)


def test_an_eager_step_without_a_reduction_in_each_call() -> None:
    options = {"on_unsupported": "eager"}
    refused(OptionError, "", Held(2, untraceable_step, sync_each_batch=True, **options).call)
    Held(2, untraceable_step, **options).updates(2)
    Held(2, plain_step, sync_each_batch=True, **options).updates(2)


# Options and other arguments


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ({"gradient_accumulation_step": 2}, {"gradient_accumulation_steps": 2}),  # "did you mean"
        ({"colour": 2}, {}),  # "remove it"
        ({"reduction": "median"}, {"reduction": "sum"}),
        ({"bucket_mb": -1}, {}),
    ],
    ids=str,
)
def test_options(wrong: dict[str, Any], right: dict[str, Any]) -> None:
    refused(OptionError, "", lambda: gradsync_fx.optimize(plain_step, **wrong))
    held = Held(1)
    held.step = gradsync_fx.optimize(plain_step, backend="aot_eager", **right)
    held.updates(2, 2 // right.get("gradient_accumulation_steps", 1))


def test_the_backend_of_a_backend() -> None:
    def compiled(**options: Any) -> Any:
        return torch.compile(plain_step, backend="gradsync", options=options)

    refused(OptionError, "", lambda: compiled(backend="gradsync"))
    held = Held(1)
    held.step = gradsync_fx.window(compiled(backend="aot_eager"))
    held.updates(1)
    refused(WindowError, "", gradsync_fx.window, plain_step)  # not compiled: as here before


def test_arguments_of_explain() -> None:
    held = Held(2)
    given = held.model, held.optimizer, X, Y
    explain = gradsync_fx.explain
    refused(OptionError, "", lambda: explain(plain_step, *given, world_size=0))
    refused(OptionError, "", lambda: explain(plain_step, *given, hardware="abacus"))
    assert "boundary" in str(explain(plain_step, *given, hardware="laptop"))


@pytest.mark.parametrize("way", ["flush", "k"])
def test_a_calibration_between_windows(way: str) -> None:
    held = Held(2 if way == "flush" else 1)
    held.call()
    args = held.step, held.model, held.optimizer, X, Y
    refused(WindowError, "calibrate", gradsync_fx.calibrate, *args)
    if way == "flush":
        held.step.flush()
    else:
        held.step.set_gradient_accumulation_steps(2)
    hardware = gradsync_fx.calibrate(*args)
    assert hardware.flops > 0
    text = str(gradsync_fx.explain(plain_step, *args[1:], hardware=hardware))
    assert "boundary" in text


def test_a_diagnosis_of_a_loop() -> None:
    held = Held(2)

    def loop() -> None:
        for _ in range(2):
            for _ in range(2):
                (mse(held.model, X, Y) / 2).backward()
            held.optimizer.step()
            held.optimizer.zero_grad()

    refused(OptionError, "", lambda: gradsync_fx.diagnose(loop, micro_steps=0))
    kind = gradsync_fx.NoGradientError
    refused(kind, "", lambda: gradsync_fx.diagnose(lambda: None, micro_steps=2))
    gradsync_fx.diagnose(loop, micro_steps=2)


# Checks on copies


class Uncopied:
    """What copy.deepcopy does not copy."""

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("no copies of this")


class Copied(Uncopied):
    def __deepcopy__(self, memo: Any) -> Copied:
        return Copied()


def test_what_a_check_copies() -> None:
    def step(held: Any, model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return plain_step(model, optimizer, x, y)

    held = Held(2, step)
    given = held.model, held.optimizer, X, Y
    refused(WindowError, "", held.step.self_check, Uncopied(), *given)
    held.step.self_check(Copied(), *given).require()
    held.step(Uncopied(), *given)  # without it


def test_a_check_of_one_number_of_micro_steps() -> None:
    held = Held("manual")
    given = held.model, held.optimizer, X, Y
    refused(WindowError, "", held.step.self_check, *given)
    quick(plain_step, 2).self_check(*given).require()


def test_a_check_of_a_step_without_backward_is_done_by_hand() -> None:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
        held = list(model.parameters())
        for p, g in zip(held, torch.autograd.grad(mse(model, x, y), held), strict=True):
            p.grad = g
        optimizer.step()
        optimizer.zero_grad()

    held = Held(1, step)
    twin = copy.deepcopy(held.model)
    refused(WindowError, "", held.step.self_check, held.model, held.optimizer, X, Y)
    held.updates(1)
    step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), X, Y)
    for p, q in zip(held.model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p, q)


class Far:
    """Makes up its attributes, so that a search of the step's objects does not find the model."""

    def __getattr__(self, name: str) -> Any:
        return _FAR[name]()


_FAR: dict[str, Any] = {}


def test_a_checks_objects_are_arguments() -> None:
    held = Held(2)

    def step(far: Any, x: Tensor, y: Tensor) -> Tensor:
        return untraceable_step(far.model, far.optimizer, x, y)

    _FAR["model"] = iter([held.model] * 99).__next__
    _FAR["optimizer"] = iter([held.optimizer] * 99).__next__
    far = quick(step, 2, on_unsupported="eager")
    refused(WindowError, "", far.self_check, Far(), X, Y)
    held.step.self_check(held.model, held.optimizer, X, Y).require()


# States and files


def test_a_state_instead_of_a_copy() -> None:
    held, other = Held(2), Held(2)
    other.model.load_state_dict(held.model.state_dict())
    held.call()
    refused(StateError, "", copy.deepcopy, held.step)
    refused(StateError, "", lambda: torch.save(held.step, io.BytesIO()))
    other.step.load_state_dict(held.step.state_dict())
    assert other.step.pending == 1
    other.updates(1)


def test_states_of_other_windows() -> None:
    held = Held(4)
    held.call()
    state = held.step.state_dict()
    refused(StateError, "", Held(2).step.load_state_dict, state)
    Held(4).step.load_state_dict(state)  # the saved value
    held.step.flush()
    Held(2).step.load_state_dict(held.step.state_dict())  # or saved at a boundary


@pytest.mark.parametrize("how", ["format", "entry", "rank", "shape", "name", "count"])
def test_states_as_they_were_saved(how: str) -> None:
    held = Held(4)
    held.call()
    right = held.step.state_dict()
    wrong = copy.deepcopy(right)
    sums = wrong["rank0"]["accumulators"]
    if how == "format":
        wrong["format"] = 99
    if how == "entry":
        wrong["micro_step"] = "three"
    if how == "rank":
        wrong["rank1"] = wrong.pop("rank0")
    if how == "shape":
        sums["0.weight"] = torch.zeros(3)
    if how == "name":
        sums["elsewhere"] = sums.pop("0.weight")
    if how == "count":
        del sums["0.weight"]
    refused(StateError, "", held.step.load_state_dict, wrong)
    held.step.load_state_dict(right)
    held.updates(3)


def test_files(tmp_path: Path) -> None:
    held = Held(4)
    held.call()
    path, plain = tmp_path / "state.pt", tmp_path / "plain.pt"
    held.step.save(path, model=held.model.state_dict())
    # Not of `save`: loaded by torch, and what it holds of the window by load_state_dict.
    torch.save({"mine": held.step.state_dict()}, plain)
    refused(StateError, "", held.step.load, plain)
    held.step.load_state_dict(torch.load(plain)["mine"])
    # What is no data is left out.
    refused(StateError, "", lambda: held.step.save(path, model=held))
    held.step.save(path, rate=0.1)
    assert held.step.load(path) == {"rate": 0.1}
    # A folder that is not there, and one that is.
    refused(StateError, "", held.step.save, tmp_path / "nowhere" / "state.pt")
    held.step.save(tmp_path / "again.pt")
    # More than data, and a torn file: saved anew, or an earlier one.
    torch.save(held.model, plain)
    refused(StateError, "", held.step.load, plain)
    held.step.save(plain)
    held.step.load(plain)
    plain.write_bytes(plain.read_bytes()[:100])
    refused(StateError, "", held.step.load, plain)
    held.step.load(path)
    held.updates(3)
