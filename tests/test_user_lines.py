"""Whose line a message names: the user's, below torch, this package and the libraries between."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from types import CodeType

import pytest
import torch
from torch.fx import Graph

import gradsync_fx
from gradsync_fx.ir.ops import node_line
from gradsync_fx.user_lines import NOWHERE, is_library, is_users, user_line, warn_user


HERE = __file__


def called_from(file: str, function: str = "warn_user") -> list[warnings.WarningMessage]:
    """What `warn_user` says when code of another file calls it, and this one calls that code."""
    code = compile(f"{function}('lost')", file, "exec")
    assert isinstance(code, CodeType)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        exec(code, {"warn_user": warn_user, "__name__": "another"})
    return told


@pytest.mark.parametrize(
    "file",
    [
        torch.nn.__file__,
        gradsync_fx.__file__,
        f"{sys.prefix}/lib/python3/site-packages/accelerate/accelerator.py",
        warnings.__file__,
        "<eval_with_key>.7",
    ],
)
def test_a_warning_is_at_the_users_line_however_it_was_reached(file: str) -> None:
    (told,) = called_from(file)
    assert told.filename == HERE
    assert told.category is gradsync_fx.GradSyncWarning


def test_an_installed_library_that_wraps_nothing_is_named_itself() -> None:
    file = f"{sys.prefix}/lib/python3/site-packages/transformers/modeling.py"
    (told,) = called_from(file)
    assert (told.filename, told.lineno) == (file, 1)
    assert is_users(file)


def test_whose_files_are_libraries() -> None:
    assert all(is_library(f) for f in (None, torch.__file__, warnings.__file__, pytest.__file__))
    assert not is_library(HERE)
    assert user_line().startswith(f"{HERE}:")


def test_a_node_names_no_line_of_torch_or_this_package() -> None:
    node = Graph().placeholder("x")
    assert node_line(node) == NOWHERE
    ours = f'  File "{gradsync_fx.__file__}", line 3, in f\n    g()\n'
    node.meta["stack_trace"] = ours
    assert node_line(node) == NOWHERE
    node.meta["stack_trace"] = f'  File "{HERE}", line 12, in f\n    g()\n' + ours
    assert node_line(node) == f"{HERE}:12"


ENDS_INSIDE_A_WINDOW = """
import torch, gradsync_fx
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

@gradsync_fx.optimize(gradient_accumulation_steps=2, backend="eager")
def train(x):
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

train(torch.ones(1, 2))
"""


def test_a_window_lost_at_the_end_of_the_process_is_told_of_at_the_step(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(ENDS_INSIDE_A_WINDOW)
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (told,) = [line for line in done.stderr.splitlines() if "pending micro-step" in line]
    assert told.startswith(f"{script}:6: GradSyncWarning: train ended with 1 pending")
