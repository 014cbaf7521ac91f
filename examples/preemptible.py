"""Asked to stop (SIGTERM), all ranks save one point and leave; started again, they go on from it, bit for bit.

`request_stop` only sets a flag. The ranks learn of each other's when they reduce, so that `stop_requested` is True on
all of them after the same update. With `--max-restarts 10` before the script, torchrun starts them again after a
`kill -TERM` of one of the processes that are named:

    torchrun --nproc-per-node 2 examples/preemptible.py
"""

import json
import os
import signal
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.console import Console
from torch import Generator, nn

import gradsync_fx
from launch import command_line, moved, ranks, replicated


WINDOW = 4  # micro-steps
AGAIN = 75  # an exit code that is no success: torchrun starts the ranks again


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The data is a function of the call: a run that goes on needs no more than the count of calls."""
    source = Generator().manual_seed(1000 * number + rank)
    x = torch.randn(16, 32, generator=source)
    return moved((x, x[:, :8].argmax(1)))


def save(folder: Path, rank: int, step, **states) -> None:
    """Each rank its file; then rank 0 says that the point is whole."""
    point = folder / f"update-{step.optimizer_step}"
    point.mkdir(parents=True, exist_ok=True)
    step.save(point / f"rank{rank}.pt", **{name: s.state_dict() for name, s in states.items()})
    if dist.is_initialized():
        dist.barrier()
    if rank == 0:
        written = folder / "latest.json.new"
        written.write_text(json.dumps(point.name))
        written.replace(folder / "latest.json")
    if dist.is_initialized():
        dist.barrier()  # no rank leaves, and takes the others with it, before that


def load(folder: Path, rank: int, step, **states) -> None:
    latest = folder / "latest.json"
    if latest.exists():
        saved = step.load(folder / json.loads(latest.read_text()) / f"rank{rank}.pt")
        for name, one in states.items():
            one.load_state_dict(saved[name])


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    usual = Path(tempfile.gettempdir(), "gradsync_fx-points")
    parser.add_argument("--folder", type=Path, default=usual, help="of points (%(default)s)")
    parser.add_argument("--updates", type=int, help="of the whole run")
    args = parser.parse_args()
    updates = args.updates or (6 if args.quick else 400)
    with ranks() as (rank, world):
        console = Console(soft_wrap=True, highlight=False)
        torch.manual_seed(0)  # the same weights on every rank
        net = nn.Sequential(nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 8))
        model = replicated(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        options = {"gradient_accumulation_steps": WINDOW, "backend": args.backend}
        step = gradsync_fx.optimize(train_step, **options)
        signal.signal(signal.SIGTERM, lambda *_: step.request_stop())

        load(args.folder, rank, step, model=net, optimizer=optimizer)
        console.print(
            f"rank {rank}: process {os.getpid()} begins after update {step.optimizer_step}"
        )
        while step.optimizer_step < updates:
            loss = step(model, optimizer, *batch(rank, step.micro_step))
            if step.stop_requested and step.optimizer_step < updates:
                save(args.folder, rank, step, model=net, optimizer=optimizer)
                console.print(f"rank {rank}: saved after update {step.optimizer_step}, stops")
                sys.exit(AGAIN)
        save(args.folder, rank, step, model=net, optimizer=optimizer)
        if rank == 0:
            (args.folder / "latest.json").unlink()  # the next run begins anew
            console.print(f"{world} rank(s), {updates} updates: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
