"""A script as users write it, for any launcher: it takes the ranks that it finds, and needs nothing of us around it.

python tests/launched.py FOLDER      what each rank has at the end goes to FOLDER/rank<n>.pt
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


sys.path.insert(0, str(Path(__file__).parent.parent))
import gradsync_fx  # the folder above is not installed
from tests.drive import plain_step
from tests.reference import regression
from tests.scenarios.groups import fresh, parameters


WINDOWS, K = 2, 2


def train(folder: str) -> None:
    """Two windows over the default group; one rank by itself where there is none."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    model, optimizer = fresh()
    wrapped = DistributedDataParallel(model) if dist.is_initialized() else model
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=K)
    for window in regression(WINDOWS, K, seed=rank):
        for batch in window:
            step(wrapped, optimizer, *batch)
    about = {"updates": step.optimizer_step, "values": parameters(model)}
    torch.save(about, Path(folder, f"rank{rank}.pt"))


def spawned(rank: int, world: int, folder: str) -> None:
    """As `torch.multiprocessing.spawn` calls it."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    train(folder)
    dist.destroy_process_group()


def accelerated(folder: str) -> None:
    """As Accelerate's launcher of processes on the CPU calls it; its command needs MPI there."""
    from accelerate import Accelerator

    Accelerator(cpu=True)  # it joins the ranks
    train(folder)


def main(how: str, folder: str) -> None:
    if how == "spawn":
        mp.spawn(spawned, (2, folder), nprocs=2)
    elif how == "accelerate":
        from accelerate import debug_launcher

        debug_launcher(accelerated, (folder,), num_processes=2)
    else:
        dist.init_process_group("gloo")
        train(folder)
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
