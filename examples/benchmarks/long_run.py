"""Whether thousands of windows leave anything behind: memory, live tensors, programs, time per call, drift.

    python examples/benchmarks/long_run.py --windows 2000

A tiny model on two ranks, over NCCL where each has a card and over gloo elsewhere, with a schedule of the learning
rate. Each rank trains a twin beside it, in plain eager PyTorch on the batches of all ranks, and tells how far the two
have come apart. Everything is in float64.
"""

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
import memory


sys.path.append(str(Path(__file__).resolve().parent.parent))  # what the examples share
from launch import device, group_backend, moved  # known only from here on


WORLD, K = 2, 4
STRETCHES = 10  # rows of the table


def train_step(model, optimizer, scheduler, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss


class Trained:
    """A model with what trains it; equal for all of them at the start."""

    def __init__(self, windows: int) -> None:
        torch.manual_seed(0)
        layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)]
        self.model = moved(torch.nn.Sequential(*layers).double())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, windows)

    def window(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """One window in eager: the batches of all ranks, one update."""
        for x, y in batches:
            (F.mse_loss(self.model(x), y) / len(batches)).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def live() -> tuple[int, int]:
    """Objects that Python's collector knows, and those of them that are tensors."""
    gc.collect()
    objects = gc.get_objects()
    return len(objects), sum(issubclass(type(o), torch.Tensor) for o in objects)


def one(rank: int, store: str, windows: int, backend: str) -> list[dict[str, Any]]:
    """In a process of its own: a row for each stretch of windows."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(WORLD)}  # as torchrun does
    if device().type == "cuda":
        torch.accelerator.set_device_index(device().index)
    torch.set_num_threads(1)
    place = {"rank": rank, "world_size": WORLD}
    dist.init_process_group(group_backend(), init_method=f"file://{store}", **place)
    mine, twin = Trained(windows), Trained(windows)
    wrapped = DistributedDataParallel(mine.model)
    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=K, backend=backend)
    source, rows = torch.Generator().manual_seed(1), []
    seconds: dict[str, list[float]] = {"accumulate": [], "boundary": []}
    for window in range(1, windows + 1):
        shape = (WORLD, K, 4)
        x = torch.randn(*shape, 8, generator=source, dtype=torch.float64)
        y = torch.randn(*shape, 1, generator=source, dtype=torch.float64)
        x, y = moved((x, y))
        for i in range(K):
            start = time.perf_counter()
            step(wrapped, mine.optimizer, mine.scheduler, x[rank, i], y[rank, i])
            name = "boundary" if step.sync_gradients else "accumulate"
            seconds[name].append(time.perf_counter() - start)
        twin.window(list(zip(x.flatten(0, 1), y.flatten(0, 1), strict=True)))
        if window % max(1, windows // STRETCHES) == 0:
            pairs = zip(mine.model.parameters(), twin.model.parameters(), strict=True)
            apart = max(float((p - q).abs().max().detach()) for p, q in pairs)
            objects, tensors = live()
            rows.append(
                {
                    "window": window,
                    "us": {name: 1e6 * statistics.median(s) for name, s in seconds.items()},
                    "resident": memory.resident(),
                    "objects": objects,
                    "tensors": tensors,
                    "programs": step.compile_count,
                    "updates": step.optimizer_step,
                    "apart": apart,
                    "sum": float(sum(p.sum() for p in mine.model.parameters())),
                }
            )
            seconds = {name: [] for name in seconds}
    dist.destroy_process_group()
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    titles = ["windows so far", "us per accumulate call", "us per boundary call", "resident, MiB"]
    titles += ["live tensors", "live objects", "programs compiled", "furthest from the eager twin"]
    lines = [titles, ["---:"] * len(titles)]
    for row in rows:
        resident = "" if row["resident"] is None else f"{row['resident'] / 2**20:.1f}"
        lines.append(
            [
                str(row["window"]),
                f"{row['us']['accumulate']:.0f}",
                f"{row['us']['boundary']:.0f}",
                resident,
                str(row["tensors"]),
                str(row["objects"]),
                str(row["programs"]),
                f"{row['apart']:.0e}",
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--windows", type=int, default=2000)
    parser.add_argument("--backend", default="inductor", help="how programs are lowered")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder")
    args = parser.parse_args()
    console = Console(soft_wrap=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        console.status(f"{args.windows} windows"),
        ProcessPoolExecutor(WORLD, multiprocessing.get_context("spawn")) as processes,
    ):
        store = str(Path(folder) / "store")
        runs = [processes.submit(one, r, store, args.windows, args.backend) for r in range(WORLD)]
        ranks = [run.result() for run in runs]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "long_run.md").write_text(table(ranks[0]))
    (args.out / "long_run.json").write_text(json.dumps(ranks, indent=1) + "\n")
    console.print(table(ranks[0]), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
