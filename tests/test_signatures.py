"""What an editor and a type checker see: every option with its type and default, and the step's own signature."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_overloads, get_type_hints

import pytest

import gradsync_fx
from gradsync_fx import api
from gradsync_fx.options import BackendOptions, Options


ROOT = Path(gradsync_fx.__file__).parent


def options_of(function: Any) -> dict[str, tuple[Any, Any]]:
    """Name to type and default of its keyword arguments."""
    hints = get_type_hints(function, vars(api))
    found = inspect.signature(function).parameters.values()
    return {p.name: (hints[p.name], p.default) for p in found if p.kind is p.KEYWORD_ONLY}


def test_both_forms_have_every_option_with_its_type_and_default() -> None:
    hints = get_type_hints(Options)
    wanted = {f.name: (hints[f.name], f.default) for f in fields(Options)}
    call, decorator = get_overloads(gradsync_fx.optimize)
    assert options_of(call) == wanted
    assert options_of(decorator) == wanted
    assert list(options_of(call)) == list(wanted), "in one order"


def test_the_dict_for_the_backend_has_every_option() -> None:
    assert get_type_hints(BackendOptions) == get_type_hints(Options)


def test_help_shows_them_and_tells_of_each() -> None:
    shown = inspect.signature(gradsync_fx.optimize).parameters
    told = inspect.getdoc(gradsync_fx.optimize) or ""
    for field in fields(Options):
        assert shown[field.name].default == field.default
        default = repr(field.default).replace("'", '"')
        heads = [line.split(":")[0] for line in told.splitlines()]
        named = [head for head in heads if re.search(rf"\b{field.name}\b", head)]
        assert any(f"({default})" in head for head in named), field.name


def test_an_unknown_option_is_told_with_the_legal_ones() -> None:
    with pytest.raises(gradsync_fx.OptionError, match="did you mean 'reduction'"):
        gradsync_fx.optimize(print, reductoin="mean")  # type: ignore[call-overload]


REVEALED = """
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
import gradsync_fx

def step(model: nn.Module, optimizer: Optimizer, x: Tensor, weight: float = 1.0) -> Tensor:
    return x

called = gradsync_fx.optimize(step, gradient_accumulation_steps=4, reduction="sum")
reveal_type(called)
reveal_type(called(nn.Linear(1, 1), Optimizer([], {}), Tensor()))
called("no model")  # E
called.prepare()  # E
gradsync_fx.optimize(step, reduction="average")  # E
gradsync_fx.optimize(step, gradient_accumulation_step=4)  # E

@gradsync_fx.optimize(gradient_accumulation_steps="manual")
def decorated(x: Tensor, last: bool) -> dict[str, Tensor]:
    return {}
reveal_type(decorated)

@gradsync_fx.optimize
def bare(x: Tensor) -> None: ...
reveal_type(bare)

class Trainer:
    @gradsync_fx.optimize(rank_timeout=60)
    def train_step(self, x: Tensor) -> float:
        return 0.0
reveal_type(Trainer().train_step)
reveal_type(Trainer().train_step(Tensor()))
reveal_type(gradsync_fx.window(called))
reveal_type(gradsync_fx.window(torch.compile(step, backend="gradsync")))
options: gradsync_fx.BackendOptions = {"gradient_accumulation_steps": 4, "reduction": "mean"}
options["reductions"] = "mean"  # E
"""
WANTED = [
    "OptimizedStep[[model: Module, optimizer: Optimizer, x: Tensor, weight: float =], Tensor]",
    "Tensor",
    "OptimizedStep[[x: Tensor, last: bool], dict[str, Tensor]]",
    "OptimizedStep[[x: Tensor], None]",
    "OptimizedStep[[x: Tensor], float]",
    "float",
    "OptimizedStep[[model: Module, optimizer: Optimizer, x: Tensor, weight: float =], Tensor]",
    "OptimizedStep[[model: Module, optimizer: Optimizer, x: Tensor, weight: float =], Tensor]",
]


def test_types_are_kept(tmp_path: Path) -> None:
    program = tmp_path / "revealed.py"
    program.write_text(REVEALED)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    cache = f"--cache-dir={tmp_path / 'cache'}"
    done = subprocess.run(
        [*command, cache, "--allow-untyped-calls", str(program)],
        cwd=tmp_path,
        env={**os.environ, "MYPYPATH": str(ROOT.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.splitlines()
    revealed = [plainly(line) for line in lines if "Revealed type" in line]
    assert revealed == WANTED, done.stdout + done.stderr
    wrong = [i for i, line in enumerate(REVEALED.splitlines(), 1) if line.endswith("# E")]
    found = {int(line.split(":")[1]) for line in lines if ": error:" in line}
    assert sorted(found) == wrong, done.stdout


def plainly(line: str) -> str:
    """A revealed type, its names without their modules."""
    return re.sub(r"[\w.]+\.(\w+)", r"\1", line.split('"')[1])


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "py.typed").read_text() == ""
