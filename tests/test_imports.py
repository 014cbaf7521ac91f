"""What is imported, and when: the command line's help does without torch, the package without torch's compiler."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync_fx


ROOT = Path(gradsync_fx.__file__).parent.parent
HELP = """
import sys
import pytest
from gradsync_fx.cli.main import main
sys.argv = ["gradsync-fx", *{arguments}]
with pytest.raises(SystemExit) as ended:
    main()
assert not ended.value.code, ended.value
assert "torch" not in sys.modules
"""
BARE = """
import sys
import torch
before = set(sys.modules)
import gradsync_fx
found = {name for name in set(sys.modules) - before if not name.startswith("gradsync_fx")}
assert not [name for name in found if name.startswith("torch")], found
assert set(gradsync_fx.__all__) <= set(dir(gradsync_fx))
gradsync_fx.OptionError, gradsync_fx.__version__
assert "torch._dynamo" not in sys.modules
for name in gradsync_fx.__all__:
    assert getattr(gradsync_fx, name).__name__ == name
assert "torch._dynamo" in sys.modules
"""
# Nothing but the entry point has imported the package's parts when the step asks for one of its names.
IN_A_STEP = """
import torch
import gradsync_fx
def train_step(model, optimizer, x):
    gradsync_fx.micro_batch_weight(len(x))
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = {"reduction": "weighted", "gradient_accumulation_steps": 2, "backend": "aot_eager"}
step = torch.compile(train_step, backend="gradsync", options=options)
step(model, optimizer, torch.ones(1, 2))
step(model, optimizer, torch.ones(3, 2))
assert gradsync_fx.window(step).optimizer_step == 1
"""

UNTOUCHED = """
import random
random.seed(5)
before = random.getstate()
import gradsync_fx
gradsync_fx.optimize
assert random.getstate() == before
"""


def run(script: str) -> str:
    """What a process of its own writes; it has to succeed."""
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        *([c, "--help"] for c in ("inspect", "diff", "plan", "doctor", "cache")),
    ],
    ids=" ".join,
)
def test_help_is_shown_without_torch(arguments: list[str]) -> None:
    assert run(HELP.format(arguments=arguments)).strip()


def test_the_compiler_is_imported_with_the_first_name_that_needs_it() -> None:
    run(BARE)


def test_a_name_that_does_not_exist_is_refused_as_by_any_module() -> None:
    with pytest.raises(AttributeError, match="module 'gradsync_fx' has no attribute 'optimise'"):
        _ = gradsync_fx.optimise


@pytest.mark.captured
def test_a_step_may_be_the_first_to_ask_for_a_name() -> None:
    run(IN_A_STEP)


def test_the_user_s_random_numbers_are_those_without_the_import() -> None:
    """Libraries draw from Python's generator while they are imported."""
    run(UNTOUCHED)
