"""A replica group of two ranks whose updates torchft's managers vote on."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import gradsync_fx
from tests.drive import plain_step


def trained(rank: int, lighthouse: str) -> dict[str, Any]:
    """Three windows; rank 1 has an error in the second. Parameters before the first and after each."""
    import torchft

    port = [0]
    if not rank:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    dist.broadcast_object_list(port, 0)
    manager: Any = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=60)),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=1,
        use_async_quorum=False,
        rank=rank,
        world_size=2,
        store_addr="127.0.0.1",
        store_port=port[0],
        lighthouse_addr=lighthouse,
        replica_id="one",
        hostname="127.0.0.1",
    )
    try:
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        step = gradsync_fx.optimize(
            plain_step, gradient_accumulation_steps=2, commit=manager.should_commit
        )
        found: dict[str, Any] = {"values": [model.weight.detach().clone()], "synced": []}
        source = torch.Generator().manual_seed(rank)
        for window in range(3):
            manager.start_quorum()
            for _ in range(2):
                x, y = (torch.randn(4, n, generator=source) for n in (8, 1))
                if window == 1 and rank == 1:
                    manager.report_error(RuntimeError("a peer is gone"))
                step(model, optimizer, x, y)
            found["synced"].append(step.sync_gradients)
            found["values"].append(model.weight.detach().clone())
        return found | {"updates": step.optimizer_step, "committed": manager.current_step()}
    finally:
        manager.shutdown(wait=False)
