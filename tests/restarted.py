"""What torchrun runs in test_ranks_groups.py: two windows of 3; the first attempt dies after the fourth call."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.drive import plain_step, quick  # the folder above is not installed
from tests.reference import regression
from tests.scenarios import groups


DIES_AFTER = 4


def main(folder: Path) -> None:
    step = quick(plain_step, 3)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
    # torch 2.13's gloo finds the addresses of the attempt before in torchrun's store, with or without this package.
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
    )
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore(f"attempt {restarts}", store),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
    )
    rank = dist.get_rank()
    model, optimizer = groups.fresh()
    ddp = DistributedDataParallel(model)
    batches = [batch for window in regression(2, 3, seed=rank) for batch in window]
    saved = folder / f"saved{rank}.pt"
    if saved.exists():
        state = torch.load(saved, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step.load_state_dict(state["window"])
    for i, batch in enumerate(batches):
        if i < step.micro_step:
            continue
        step(ddp, optimizer, *batch)
        if i + 1 == DIES_AFTER and restarts == "0":
            torch.save(
                {
                    "model": model.state_dict(),
                    "optimizer": optimizer.state_dict(),
                    "window": step.state_dict(),
                },
                saved,
            )
            dist.barrier()
            if rank == 1:
                sys.exit(7)
    torch.save(
        {"parameters": groups.parameters(model), "restarts": restarts}, folder / f"end{rank}.pt"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
