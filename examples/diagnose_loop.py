"""A `no_sync` in the wrong place is found by watching eight real micro-steps of the loop: a loop without `optimize`.

python examples/diagnose_loop.py
torchrun --nproc-per-node 2 examples/diagnose_loop.py
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx


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


def join_group() -> None:
    """The ranks that torchrun started, or this process alone: DDP runs its reducer in both."""
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def main() -> None:
    join_group()
    torch.manual_seed(0)
    model = DistributedDataParallel(
        nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [(torch.randn(16, 64), torch.randint(10, (16,))) for _ in range(2 * WINDOW)]

    for loop in (misplaced, mended):
        diagnosis = gradsync_fx.diagnose(loop, model, optimizer, batches, micro_steps=WINDOW)
        if dist.get_rank() == 0:
            print(f"{loop.__name__}\n{diagnosis}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
