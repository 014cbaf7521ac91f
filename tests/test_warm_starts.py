"""A process whose caches another one filled trains as that one did, to the bit, and traces no further than Dynamo."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import gradsync_fx


pytestmark = [pytest.mark.captured, pytest.mark.inductor]

SCRIPT = """
import hashlib, json, re, sys
import torch
import torch.nn.functional as F
import gradsync_fx
from gradsync_fx.capture import functional
from tests.models import TinyGPT, mlp
from torch._dynamo.utils import counters

made = []
plain = functional.aot_module_simplified
functional.aot_module_simplified = lambda *a, **k: made.append(1) or plain(*a, **k)

def train_step(model, optimizer, x, y):
    out = model(x)
    loss = F.cross_entropy(out.flatten(0, 1), y.flatten()) if out.dim() > 2 else F.mse_loss(out, y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss

torch.manual_seed(0)
if sys.argv[1] == "gpt":
    model, shape = TinyGPT(), (2, 6)
else:
    model, shape = mlp(), None
optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2)
losses = []
for _ in range(4):
    batch = (torch.randint(8, shape), torch.randint(8, shape)) if shape else (torch.randn(4, 8), torch.randn(4, 1))
    losses.append(step(model, optimizer, *batch).item())
digest = hashlib.sha256()
for value in (*model.parameters(), *(t for s in optimizer.state.values() for t in s.values())):
    digest.update(value.detach().numpy().tobytes())
print(json.dumps({
    "traced": len(made), "losses": losses, "digest": digest.hexdigest(),
    "report": re.sub(r"\\s+[0-9.]+ (ns|us|ms|s)\\b", "", str(step.report())),
    "compiled": counters["inductor"]["fxgraph_cache_miss"], "loaded": counters["inductor"]["fxgraph_cache_hit"],
}))
"""  # fmt: skip


def run(model: str, folder: Path) -> dict[str, Any]:
    """What a new process finds."""
    root = str(Path(gradsync_fx.__file__).parents[1])
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder), "PYTHONPATH": root}
    command = [sys.executable, "-c", SCRIPT, model]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "is ignored" not in done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("model", ["mlp", "gpt"])
def test_a_warm_process_trains_as_a_cold_one(model: str, tmp_path: Path) -> None:
    cold, warm = run(model, tmp_path), run(model, tmp_path)
    assert (cold["traced"], warm["traced"]) == (1, 0)
    assert cold["compiled"] > 0
    assert len(set(cold["losses"])) == 4, "nothing was trained"
    assert (warm["compiled"], warm["loaded"]) == (0, cold["compiled"] + cold["loaded"])
    for same in ("losses", "digest", "report"):
        assert warm[same] == cold[same]
