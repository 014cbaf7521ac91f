"""A `no_sync` in the wrong place is found by watching eight real micro-steps of the loop: a loop without `optimize`.

python examples/diagnose_loop.py
torchrun --nproc-per-node 2 examples/diagnose_loop.py
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import nn

import gradsync_fx
from launch import moved, ranks, replicated


WINDOW = 4  # micro-steps in an update


def misplaced(model, optimizer, batches) -> None:
    """DDP decides in forward whether a backward will reduce; this no_sync comes too late for it."""
    for i, (x, y) in enumerate(batches):
        last = (i + 1) % WINDOW == 0
        loss = F.cross_entropy(model(x), y) / WINDOW
        with nullcontext() if last else model.no_sync():
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def mended(model, optimizer, batches) -> None:
    """The same with the forward inside."""
    for i, (x, y) in enumerate(batches):
        last = (i + 1) % WINDOW == 0
        with nullcontext() if last else model.no_sync():
            loss = F.cross_entropy(model(x), y) / WINDOW
            loss.backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def main() -> None:
    with ranks(joined=True) as (rank, _):  # alone, too: DDP runs its reducer in both
        torch.manual_seed(0)
        model = replicated(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        batches = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(2 * WINDOW)]

        for loop in (misplaced, mended):
            diagnosis = gradsync_fx.diagnose(
                loop, model, optimizer, moved(batches), micro_steps=WINDOW
            )
            if rank == 0:
                print(f"{loop.__name__}\n{diagnosis}\n")


if __name__ == "__main__":
    main()
