"""The private names of torch in `_torch.py`: a missing one is reported by name, and the rest do what they say."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gradsync_fx
from gradsync_fx import _torch
from tests.refusals import refused
from tests.scenarios import wires
from tests.workers import Ranks


MISSING = """
import torch._dynamo.guards
del torch._dynamo.guards.install_guard
import gradsync_fx
gradsync_fx.optimize
"""


def test_a_loop_over_part_of_a_row_is_not_split() -> None:
    """Inductor splits loops by the divisor of an index, and leaves out what remains."""

    def cut(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (x / scale).reshape(-1)[:1056] + 1  # 16 rows and a half

    x, scale = torch.randn(33, 64), torch.rand(33, 1) + 1
    with _torch.loops_split_evenly():
        torch.testing.assert_close(torch.compile(cut)(x, scale), cut(x, scale))


def test_a_missing_name_is_reported_with_both_versions() -> None:
    class Owner:
        pass

    error = refused(
        gradsync_fx.VersionError,
        f"torch {torch.__version__}",
        _torch.check_names,
        [(nn.Module, "forward"), (Owner, "gone")],
    )
    assert "Owner.gone" in error.seen
    assert f"gradsync_fx {gradsync_fx.__version__}" in error.seen
    assert "2.11" in error.wanted


def test_a_missing_name_is_told_at_the_first_use_of_the_package() -> None:
    root = Path(gradsync_fx.__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-c", MISSING],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    last = done.stderr[done.stderr.rindex("gradsync_fx.errors.VersionError") :]
    assert f"torch {torch.__version__}: " in last
    assert f"gradsync_fx {gradsync_fx.__version__}" in last
    assert "install_guard" in last


def test_a_version_outside_the_tested_range_is_named_beside_ours() -> None:
    error = refused(gradsync_fx.VersionError, "torch", _torch.check_version, (2, 4))
    assert error.seen == f"version 2.4 is installed beside gradsync_fx {gradsync_fx.__version__}"
    _torch.check_version((2, 13))


def test_what_a_loss_is_divided_by() -> None:
    x = torch.ones(2, 3, requires_grad=True)
    assert float(_torch.saved_factor((x.sum() / 4).grad_fn)) == 4
    assert _torch.saved_factor((x + 1).grad_fn) is None
    assert _torch.summed_sizes(x.sum().grad_fn) == (2, 3)
    assert _torch.summed_sizes((x + 1).grad_fn) == ()


def test_whether_a_module_is_compiled() -> None:
    module = nn.Linear(1, 1)
    assert not _torch.is_compiled(module)
    module.compile(backend="eager")
    assert _torch.is_compiled(module)


@pytest.mark.gloo
def test_collectives_are_counted(ranks: Ranks) -> None:
    for before, after in ranks(wires.counted):
        assert after == before + 2
