"""Files of Inductor's cache that a full disk, or a process that was killed, left torn."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import gradsync_fx


SCRIPT = """
import torch, gradsync_fx
from tests.drive import plain_step
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
torch.nn.init.ones_(model.weight)
step = gradsync_fx.optimize(plain_step)
print([step(model, optimizer, torch.ones(2, 8), torch.zeros(2, 1)).item() > 0 for _ in range(2)])
"""


def run(folder: Path) -> tuple[str, str]:
    """What a new process prints, and its warnings."""
    root = str(Path(gradsync_fx.__file__).parents[1])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": root}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def test_a_torn_file_is_compiled_anew(tmp_path: Path) -> None:
    """With a warning whose way out works: without the folder there is none."""
    folder = tmp_path / "cache"
    plain, warned = run(folder)
    assert "damaged" not in warned
    torn = [p for p in folder.rglob("*") if p.suffix in (".so", ".py")]
    assert torn
    for path in torn:
        os.truncate(path, 20)
    again, warned = run(folder)
    assert again == plain
    assert f"delete {folder}" in warned
    shutil.rmtree(folder)
    again, warned = run(folder)
    assert again == plain
    assert "damaged" not in warned
