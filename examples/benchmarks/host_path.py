"""What the host adds to a call: guards, argument binding, the counter; everything round the compiled program itself.

    python examples/benchmarks/host_path.py --layers 1,16,64

The model is so small that the program is little more than calls of kernels.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import nn

import gradsync_fx


sys.path.append(str(Path(__file__).resolve().parent.parent))  # what the examples share
from launch import moved  # known only from here on


def train_step(model, optimizer, x, y):
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def one(layers: int, calls: int, backend: str) -> dict[str, Any]:
    """Medians, in microseconds, of a call and of the compiled program in it: accumulate calls, and boundaries."""
    torch.manual_seed(0)
    model = moved(nn.Sequential(*(nn.Linear(8, 8) for _ in range(layers))))
    optimizer = torch.optim.AdamW(model.parameters())
    step = gradsync_fx.optimize(
        train_step, gradient_accumulation_steps=2, backend=backend, dynamic=False
    )
    x, y = moved((torch.randn(4, 8), torch.randn(4, 8)))
    for _ in range(20):
        step(model, optimizer, x, y)
    (captured,) = step._executor.catalogue.captures
    inside = [0.0]
    compiled = captured.programs._compiled
    compiled.update({key: replace(c, run=timed(c.run, inside)) for key, c in compiled.items()})
    seconds: dict[str, list[float]] = {}
    for _ in range(2 * calls):
        inside[0] = 0.0
        start = time.perf_counter()
        step(model, optimizer, x, y)
        whole = time.perf_counter() - start
        kind = "boundary" if step.sync_gradients else "accumulate"
        for name, spent in (("call", whole), ("around", whole - inside[0])):
            seconds.setdefault(f"{kind} {name}", []).append(spent)
    return {
        "parameters": len(list(model.parameters())),
        **{name: 1e6 * statistics.median(spent) for name, spent in seconds.items()},
    }


def timed(run: Callable[[list[Any]], Any], inside: list[float]) -> Callable[[list[Any]], Any]:
    def call(args: list[Any]) -> Any:
        start = time.perf_counter()
        try:
            return run(args)
        finally:
            inside[0] += time.perf_counter() - start

    return call


def table(rows: list[dict[str, Any]]) -> str:
    columns = [
        f"{kind} {name}" for kind in ("accumulate", "boundary") for name in ("call", "around")
    ]
    titles = [
        f"{kind} call, us" if name == "call" else "around its program, us"
        for kind, name in (column.split() for column in columns)
    ]
    lines = [
        ["parameters", *titles],
        ["---:"] * 5,
        *([str(r["parameters"]), *(f"{r[c]:.0f}" for c in columns)] for r in rows),
    ]  # fmt: skip
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 16, 64]
    )
    parser.add_argument("--calls", type=int, default=1000, help="timed, of each kind")
    parser.add_argument("--backend", default="inductor")
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder")
    args = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(soft_wrap=True)
    rows = [
        one(layers, args.calls, args.backend)
        for layers in track(args.layers, "layers", console=console)
    ]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "host_path.md").write_text(table(rows))
    (args.out / "host_path.json").write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table(rows), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
