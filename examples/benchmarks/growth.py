"""How capture, analysis and passes grow with the number of layers; nothing is lowered or run.

    python examples/benchmarks/growth.py --layers 1,4,16,64

Each depth has a fresh process. torch's share (Dynamo, AOTAutograd, and tracing the optimizer's update) is told apart
from ours: what is not spent in one of our own stages is torch's.
"""

import argparse
import importlib
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from rich.console import Console

import gradsync_fx
import memory
from workloads import GPT


# Where our stages begin; what one calls of another counts for the other.
STAGES = {
    "gradsync_fx.capture.tracer:rematerialize": "capture",
    "gradsync_fx.capture.tracer:_capture": "capture",
    "gradsync_fx.runtime.capture_cache:Catalogue.admit": "analysis",
    "gradsync_fx.optim.binding:trace_update": "torch",
    "gradsync_fx.runtime.program_cache:build": "passes",
    "gradsync_fx.inspection.held:rewrite": "lowering",
    "gradsync_fx.dispatch:describe": "report",
}
OWN = ("capture", "analysis", "passes", "lowering")


class Clock:
    """Seconds by stage; time spent in an inner stage is not counted for the outer one."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(["torch", *OWN, "report"], 0.0)
        self._stage, self._since = "torch", time.perf_counter()

    def enter(self, stage: str) -> str:
        """Counts for `stage` from now on; returns the stage before."""
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        before, self._stage, self._since = self._stage, stage, now
        return before

    def timed(self, function: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before = self.enter(stage)
            try:
                return function(*args, **kwargs)
            finally:
                self.enter(before)

        return call


@contextmanager
def stages_timed(clock: Clock) -> Iterator[None]:
    with ExitStack() as stack:
        for place, stage in STAGES.items():
            module, _, path = place.partition(":")
            *inside, name = path.split(".")
            owner: Any = importlib.import_module(module)
            for part in inside:
                owner = getattr(owner, part)
            timed = clock.timed(getattr(owner, name), stage)
            stack.enter_context(mock.patch.object(owner, name, timed))
        yield


def train_step(model, optimizer, ids):
    loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def explained(layers: int) -> Callable[[], Any]:
    """What makes the report of a GPT, narrow so that its parameters take no room."""
    model = GPT(width=64, depth=layers, heads=4, length=32)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(256, (2, 33))
    window = {"gradient_accumulation_steps": 4, "world_size": 2}
    return lambda: gradsync_fx.explain(train_step, model, optimizer, ids, **window)


def one(layers: int) -> dict[str, Any]:
    """In a process of its own: seconds by stage, nodes, and bytes at the peak."""
    torch.set_num_threads(1)
    explained(1)()  # the first trace of a process also imports half of torch
    explain = explained(layers)
    device, found = torch.device("cpu"), []
    clock = Clock()

    def work() -> None:
        clock.enter("torch")
        clock.seconds = dict.fromkeys(clock.seconds, 0.0)
        with stages_timed(clock):
            found.append(explain())
        clock.enter("torch")

    peak = memory.growth(work, device)
    return {
        "layers": layers,
        "nodes": sum(program.nodes for program in found[0].programs),
        "seconds": clock.seconds,
        "own": sum(clock.seconds[stage] for stage in OWN),
        "peak": peak,
    }


def table(rows: list[dict[str, Any]]) -> str:
    titles = ["layers", "nodes of both programs", *(f"{s}, s" for s in OWN), "ours in all, s"]
    titles += ["ours, us per node", "torch, s", "report, s", "MiB at the peak"]
    lines = [titles, ["---:"] * len(titles)]
    for row in rows:
        seconds = row["seconds"]
        peak = "" if row["peak"] is None else f"{row['peak'] / 2**20:.0f}"
        lines.append(
            [
                str(row["layers"]),
                str(row["nodes"]),
                *(f"{seconds[stage]:.2f}" for stage in OWN),
                f"{row['own']:.2f}",
                f"{1e6 * row['own'] / row['nodes']:.0f}",
                f"{seconds['torch']:.2f}",
                f"{seconds['report']:.2f}",
                peak,
            ]
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--layers", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 16, 64]
    )
    parser.add_argument("--out", type=Path, default=Path("benchmark-results"), help="folder")
    args = parser.parse_args()
    console = Console(soft_wrap=True)
    rows = []
    for layers in args.layers:
        with (
            console.status(f"{layers} layers"),
            ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process,
        ):
            rows.append(process.submit(one, layers).result())
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "growth.md").write_text(table(rows))
    (args.out / "growth.json").write_text(json.dumps(rows, indent=1) + "\n")
    console.print(table(rows), markup=False, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
