"""`gradsync-fx diagnose`: the script runs as it does alone, what it trains is told, and nothing of the watch stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import gradsync_fx
from tests.long import long_but


ROOT = Path(gradsync_fx.__file__).parent.parent
LOOP = """
import atexit
import sys

import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

import beside

atexit.register(lambda: print("at exit"))
watched = hasattr(torch.autograd.backward, "__wrapped__")
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(int(sys.argv[1])):
    loss = F.mse_loss(model(torch.randn(3, 4)), torch.zeros(3, 2)) / 2
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
        print("update", flush=True)
assert hasattr(torch.autograd.backward, "__wrapped__") == (int(sys.argv[1]) < 7 and watched), "still watched"
assert __name__ == "__main__" and sys.argv[1:] == [sys.argv[1], "--lr", "x"], sys.argv
assert sys.path[0] == beside.__file__.rpartition("/")[0], sys.path
"""
DDP = """
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for i in range(6):
    (model(torch.ones(2, 4)).mean() / 2).backward()
    if (i + 1) % 2 == 0:
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
sys.stdout.write(f"arguments {sys.argv[1:]}\\n")  # in one piece: the ranks share a pipe
"""


def script(folder: Path, text: str) -> str:
    """Its path. Beside it is a module that it can import."""
    (folder / "beside.py").touch()
    (folder / "train.py").write_text(text)
    return str(folder / "train.py")


def started(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """A Python process."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def diagnose(cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return started("-m", "gradsync_fx", "diagnose", *words, cwd=cwd)


def test_a_script_runs_on_when_its_windows_were_seen(tmp_path: Path) -> None:
    ended = diagnose(tmp_path, script(tmp_path, LOOP), "20", "--lr", "x")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "update\n" * 10 + "at exit\n"
    culprit = LOOP.splitlines().index("    clip_grad_norm_(model.parameters(), 1.0)") + 1
    assert "error clip-inside-window" in ended.stderr
    assert f"train.py:{culprit}" in ended.stderr
    assert "6 micro-steps, 3 updates" in ended.stderr
    assert "--micro-steps K says what is meant" in ended.stderr
    assert "window-left-open" not in ended.stderr


def test_as_a_module_it_stops_where_it_is_told_to(tmp_path: Path) -> None:
    options = ("--stop", "--windows", "2", "--micro-steps", "2")
    path = script(tmp_path, LOOP)
    ended = started("-m", "gradsync_fx.diagnose", *options, path, "20", "--lr", "x", cwd=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert ended.stdout == "update\n" * 2 + "at exit\n"
    assert "4 micro-steps, 2 updates" in ended.stderr
    assert "says what is meant" not in ended.stderr

    right = LOOP.replace("    clip_grad", "    0 and clip_grad")
    path = script(tmp_path, right)
    ended = started("-m", "gradsync_fx.diagnose", *options, path, "20", "--lr", "x", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "the loop looks right" in ended.stderr


ENDS = [
    ("raise ZeroDivisionError('mine')", 1, "ZeroDivisionError: mine"),
    ("sys.exit(7)", 7, "says what is meant"),
    ("sys.exit('gone')", 1, "gone"),
    ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ("def broken(:", 1, "SyntaxError: invalid syntax"),
]


@pytest.mark.parametrize(("end", "code", "last"), long_but(ENDS, ENDS[:2]))
def test_exceptions_and_exit_codes_stay_the_scripts(
    tmp_path: Path, end: str, code: int, last: str
) -> None:
    path = script(tmp_path, f"{LOOP}{end}\n")
    ended, alone = (
        started(*words, path, "6", "--lr", "x", cwd=tmp_path)
        for words in (("-m", "gradsync_fx.diagnose"), ())
    )
    assert ended.returncode == alone.returncode == code, ended.stderr
    assert last in ended.stderr.splitlines()[-1]
    assert ended.stdout == alone.stdout
    assert ended.stderr.endswith(alone.stderr), "another traceback than the script's own"


def test_a_script_that_fails_early_or_trains_nothing(tmp_path: Path) -> None:
    ended = diagnose(tmp_path, script(tmp_path, "print('no training here')\n"))
    assert ended.returncode == 0
    assert ended.stdout == "no training here\n"
    assert "no training was seen" in ended.stderr

    ended = diagnose(tmp_path, script(tmp_path, f"{LOOP}1 / 0\n"), "1", "--lr", "x")
    assert ended.returncode == 1
    assert "failed after 1 micro-step, before an update was seen" in ended.stderr
    assert "ZeroDivisionError" in ended.stderr.splitlines()[-1]


def test_command_lines_and_modules(tmp_path: Path) -> None:
    path = script(tmp_path, LOOP)
    ended = diagnose(tmp_path, "--", "python", "-u", path, "4", "--lr", "x")
    assert (ended.returncode, ended.stdout) == (0, "update\nupdate\nat exit\n"), ended.stderr
    for words in (("-m", "train"), ("--", "python3", "-m", "train")):
        ended = diagnose(tmp_path, *words, "4", "--lr", "x")
        assert (ended.returncode, ended.stdout) == (0, "update\nupdate\nat exit\n"), ended.stderr


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("nowhere.py",), "there is no such file"),
        (("--", "python", "-O", "train.py"), "names no script"),
        (("--", "torchrun", "--no-python", "train.py"), "torchrun starts a program"),
    ],
)
def test_what_is_no_script(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    script(tmp_path, LOOP)
    ended = diagnose(tmp_path, *words)
    assert ended.returncode == 2
    assert says in ended.stderr
    assert "what to do" in ended.stderr


@pytest.mark.gloo
@pytest.mark.parametrize("way", ["torchrun -m", "-- torchrun"])
def test_ranks(tmp_path: Path, way: str) -> None:
    """Rank 0 alone tells, of DDP modules and groups that are made while it is watched."""
    path = script(tmp_path, DDP)
    ranks = ("--standalone", "--nproc-per-node", "2")
    if way == "-- torchrun":
        ended = diagnose(tmp_path, "--windows", "2", "--", "torchrun", *ranks, path, "--lr", "x")
    else:
        words = ("-m", "torch.distributed.run", *ranks, "-m", "gradsync_fx.diagnose")
        ended = started(*words, "--windows", "2", path, "--lr", "x", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("arguments ['--lr', 'x']") == 2
    assert ended.stderr.count("warning reduced-every-micro-step") == 1
    assert "world size 2" in ended.stderr


def test_the_module_and_the_function_of_one_name() -> None:
    """Whoever imports the module finds the function, in whatever order."""
    code = """
import gradsync_fx.diagnose
from gradsync_fx.eager_loops import diagnose as meant
assert gradsync_fx.diagnose is meant
from gradsync_fx import diagnose
assert diagnose is meant
import importlib
assert importlib.import_module("gradsync_fx.diagnose") is meant
"""
    for first in (
        "",
        "import gradsync_fx; gradsync_fx.diagnose\n",
        "import gradsync_fx.eager_loops\n",
    ):
        ended = started("-c", first + code, cwd=ROOT)
        assert ended.returncode == 0, ended.stderr
