"""A run that exports what it compiled, or starts from what another one exported; what it found is written as JSON.

python tests/exported.py export|load PATH ROW FOLDER      each rank's findings go to FOLDER/rank<n>.json
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel


sys.path.insert(0, str(Path(__file__).parent.parent))
import gradsync_fx  # the folder above is not installed
from tests.models import TinyGPT, mlp


ROWS: dict[str, dict[str, Any]] = {
    "gpt": {},
    "many options": {
        "reduction": "weighted",
        "skip_nonfinite": True,
        "reduce_dtype": torch.bfloat16,
        "accumulator_dtype": torch.float64,
        "broadcast_buffers": "every",
        "bucket_cap_mb": 0.001,
        "on_update": lambda record: None,
    },
    "shards": {"shard_optimizer": True, "commit": lambda: True},
}


def main(what: str, path: str, row: str, folder: str) -> None:
    rank = 0
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.manual_seed(0)
    net: torch.nn.Module = TinyGPT() if row == "gpt" else mlp()
    model = DistributedDataParallel(net) if dist.is_initialized() else net
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
    options = dict(ROWS[row])
    path = f"{path}.{rank}" if row == "shards" else path

    def train_step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        out = model(x)
        loss = (
            F.cross_entropy(out.flatten(0, 1), y.flatten()) if row == "gpt" else F.mse_loss(out, y)
        )
        if row == "many options":
            gradsync_fx.micro_batch_weight(x[:, 0].exp().sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(100 * rank + seed)
        if row == "gpt":
            return torch.randint(8, (2, 6), generator=drawn), torch.randint(
                8, (2, 6), generator=drawn
            )
        return torch.randn(4, 8, generator=drawn), torch.randn(4, 1, generator=drawn)

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if what == "load":
            options["artifact"] = path
        step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2, **options)
        if what == "export":
            step.prepare(*batch(0))
            if rank == 0 or row == "shards":
                step.export(path)
        losses = [step(*batch(call)).item() for call in range(5)]
        step.flush()
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in net.parameters()))
    found = {
        "losses": losses,
        "digest": digest.hexdigest(),
        "updates": step.optimizer_step,
        "compiled": counters["inductor"]["fxgraph_cache_miss"],
        "loaded": counters["inductor"]["fxgraph_cache_hit"],
        "told": [str(w.message) for w in told if "artifact" in str(w.message)],
    }
    Path(folder, f"rank{rank}.json").write_text(json.dumps(found))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
