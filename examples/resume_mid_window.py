"""A run that stops in the middle of a window goes on in a new process, bitwise as if it never had.

It saves with torch.save alone, with torch.distributed.checkpoint on several ranks, and then starts
itself anew with --resume:

    python examples/resume_mid_window.py
    torchrun --nproc-per-node 2 examples/resume_mid_window.py
"""

import subprocess
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rich.console import Console
from torch import Generator, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import gradsync_fx
from launch import command_line, device, moved, ranks, replicated


WINDOW = 4  # micro-steps
TORCHRUN = "-m torch.distributed.run --standalone --nproc-per-node"


def train_step(model, optimizer, x, y):
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


class Run:
    """A run from its start: all its objects are its own."""

    def __init__(self, rank: int, backend: str) -> None:
        torch.manual_seed(0)  # the same weights on every rank
        self.net = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 2))
        self.rank, self.model = rank, replicated(self.net)
        self.random = torch.cuda if device().type == "cuda" else torch  # what dropout draws from
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.05)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.9)
        options = {"gradient_accumulation_steps": WINDOW, "backend": backend}
        self.step = gradsync_fx.optimize(train_step, **options)
        # Compiles without running: the state has all its tensors from now on, as dcp.load wants.
        self.step.prepare(self.model, self.optimizer, *self.batch(0))
        torch.manual_seed(1 + rank)  # each rank has its own dropout

    def batch(self, n: int):
        """This rank's n-th, always the same: the place in the data is `step.micro_step`."""
        x = torch.randn(16, 8, generator=Generator().manual_seed(1000 * self.rank + n))
        return moved((x, (x.sum(1) > 0).long()))

    def train(self, end: int) -> None:
        for n in range(self.step.micro_step, end):
            self.step(self.model, self.optimizer, *self.batch(n))
            if self.step.sync_gradients:
                self.scheduler.step()

    def state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        own = {"window": self.step.state_dict(), "scheduler": self.scheduler.state_dict()}
        own[f"random{self.rank}"] = self.random.get_rng_state()  # differs between ranks
        return {"model": model, "optimizer": optimizer, **own}

    def load(self, state: dict) -> None:
        saved = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self.model, self.optimizer, **saved)
        self.scheduler.load_state_dict(state["scheduler"])
        self.step.load_state_dict(state["window"])
        self.random.set_rng_state(state[f"random{self.rank}"])


def stop(args, after: int, folder: str) -> None:
    with ranks() as (rank, world):
        run = Run(rank, args.backend)
        run.train(after)
        if world > 1:
            dist.broadcast_object_list(box := [folder])  # rank 0's
            dcp.save(run.state(), checkpoint_id=box[0])
        else:
            torch.save(run.state(), f"{folder}/state.pt")
    if rank == 0:
        launcher = f"{TORCHRUN} {world}".split() if world > 1 else []
        subprocess.run([sys.executable, *launcher, *sys.argv, "--resume", folder], check=True)


def resume(args, end: int) -> None:
    with ranks() as (rank, world):
        straight, run = Run(rank, args.backend), Run(rank, args.backend)
        straight.train(end)  # never stops
        if world > 1:
            dcp.load(state := run.state(), checkpoint_id=args.resume)
        else:
            state = torch.load(f"{args.resume}/state.pt", weights_only=True)
        run.load(state)
        console = Console(quiet=rank > 0, soft_wrap=True)
        console.print(f"resumed after call {run.step.micro_step}, {run.step.pending} pending")
        run.train(end)
        assert all(map(torch.equal, run.net.parameters(), straight.net.parameters()))
        console.print(f"after call {end}: bitwise the parameters of the run that never stopped")


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    parser.add_argument("--resume", metavar="FOLDER", help="go on with what was saved there")
    args = parser.parse_args()
    end = 12 if args.quick else 60  # calls; a window is open after half of them
    if args.resume:
        return resume(args, end)
    with tempfile.TemporaryDirectory() as folder:
        return stop(args, end // 2, folder)


if __name__ == "__main__":
    main()
