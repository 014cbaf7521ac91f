"""`explain(..., target=...)`: a live step's programs as code for a card that is not there; nothing is changed by it."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.errors import OptionError, ToolchainError
from gradsync_fx.inspection.report import Report
from gradsync_fx.lowering.target import cards
from gradsync_fx.lowering.target.cards import CARDS, check_toolchain
from tests.refusals import refused


pytestmark = [pytest.mark.cross, pytest.mark.captured]
weights = torch.ones(4)  # a step finds it by name


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(model(x), y, weight=weights)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def trained() -> tuple[nn.Module, torch.optim.Optimizer, Tensor, Tensor]:
    """A model that has been trained: autograd has started without any CUDA device, and the optimizer has a state."""
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.GELU(), nn.Linear(16, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given = (model, optimizer, torch.randn(6, 8), torch.randint(4, (6,)))
    train_step(*given)
    return given


@pytest.fixture(scope="module")
def given() -> tuple[Any, ...]:
    try:
        check_toolchain("cuda:sm_90")
    except ToolchainError as error:
        pytest.skip(str(error))
    return trained()


@pytest.fixture(scope="module")
def report(given: tuple[Any, ...]) -> Report:
    return gradsync_fx.explain(
        train_step, *given, gradient_accumulation_steps=4, world_size=8, target="cuda:sm_90"
    )


def test_programs_are_code_with_the_users_lines(report: Report) -> None:
    assert report.code is not None
    assert [p.name for p in report.code.programs] == ["accumulate", "boundary", "tail"]
    for program in report.code.programs:
        made = [k for k in program.kernels if k.kind == "triton"]
        assert all("@triton.jit" in k.source and k.cubin and k.registers for k in made)
        assert program.launches == sum(k.launches for k in program.kernels)
        assert program.seconds > 0
    accumulate, boundary, tail = report.code.programs
    step_lines = {
        line.rpartition("/")[2].split(":")[0] for k in accumulate.kernels for line in k.lines
    }
    assert step_lines == {"test_targets.py"}
    assert {"forward", "backward"} <= {r for k in accumulate.kernels for r in k.regions}
    assert "optimizer" not in {r for k in accumulate.kernels for r in k.regions}
    assert "optimizer" in {r for k in boundary.kernels for r in k.regions}
    assert "forward" not in {r for k in tail.kernels for r in k.regions}
    assert (accumulate.reductions, boundary.reductions, tail.reductions) == (0, 1, 1)
    assert accumulate.recording.verdict == "whole"
    assert report.predicted.hardware.name == "h100-nvlink"


def test_views_of_the_report_have_it(report: Report) -> None:
    assert "code for cuda:sm_90" in str(report)
    assert '"target": "cuda:sm_90"' in report.to_json()
    assert "NVIDIA H100" in report.to_html()


def test_nothing_remains_changed(given: tuple[Any, ...], report: Report) -> None:
    model, optimizer, x, _ = given
    held = [*model.parameters(), *model.buffers(), x, weights]
    held += [v for state in optimizer.state.values() for v in state.values()]
    assert {(type(t).__name__, t.device.type) for t in held} == {
        ("Parameter", "cpu"),
        ("Tensor", "cpu"),
    }
    assert set(optimizer.state) == set(model.parameters())
    assert not torch.cuda.is_available()
    with pytest.raises((AssertionError, RuntimeError)):
        torch.ones(1, device="cuda")
    before = float(train_step(*given))
    step = gradsync_fx.optimize(train_step, backend="aot_eager")
    assert float(step(*given)) < before


def test_errors_of_the_step_come_back_as_they_are(given: tuple[Any, ...]) -> None:
    def wrong(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y)

    with pytest.raises(gradsync_fx.NoBackwardError):
        gradsync_fx.explain(wrong, *given, target="cuda:sm_80")
    assert {p.device.type for p in given[0].parameters()} == {"cpu"}


def test_bad_targets(given: tuple[Any, ...], report: Report) -> None:
    """And what the errors say to do."""

    def explained(options: dict[str, Any]) -> Report:
        return gradsync_fx.explain(train_step, *given, **options)

    error = refused(OptionError, "target 'cuda:sm_70'", explained, {"target": "cuda:sm_70"})
    assert all(target in error.wanted for target in CARDS)
    refused(
        OptionError, "argument 'target'", explained, {"target": "cuda:sm_90", "backend": "eager"}
    )
    assert report.code is not None  # as the errors say: with one of the targets, and with Inductor
    assert report.code.target == "cuda:sm_90"
    assert explained({}).code is None


def test_a_step_with_an_argument_target() -> None:
    model, optimizer, x, y = trained()

    def named(
        model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, target: Tensor
    ) -> Tensor:
        return train_step(model, optimizer, x, target)

    with pytest.raises(OptionError, match="argument 'target'"):
        gradsync_fx.explain(named, model, optimizer, x, target=y)
    assert gradsync_fx.explain(named, model, optimizer, x, y).programs


@pytest.mark.parametrize(
    ("where", "name", "fix"),
    [
        (cards.importlib.util, "find_spec", "pip install triton"),
        (shutil, "which", "apt-get install g++"),
    ],
)
def test_a_missing_toolchain_says_what_to_install(
    where: Any, name: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, lambda *args: None)
    error = refused(ToolchainError, "target 'cuda:sm_90'", check_toolchain, "cuda:sm_90")
    assert fix in error.fix
