"""Parameters that come to differ between two ranks, by what each of them does on its own."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.counting import counted
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.scenarios.common import data_of


def drifting(rank: int, how: str, at: int, updates: int) -> dict[str, Any]:
    """One update a call. how: what rank 1 does before call `at` (1-based)."""
    torch.manual_seed(0)
    net = mlp()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    step = quick(plain_step)
    gathers, said, error = [], [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            for call in range(1, updates + 1):
                if rank == 1 and call == at:
                    _drift(how, net, optimizer)
                with counted() as one:
                    step(model, optimizer, *data_of(rank, 1, 1)[0][0])
                gathers.append(one.all_gathers)
        except gradsync_fx.RanksDisagreeError as failure:
            error = str(failure)
        said = [
            str(w.message) for w in caught if issubclass(w.category, gradsync_fx.GradSyncWarning)
        ]
    return {"updates": step.optimizer_step, "error": error, "warnings": said, "gathers": gathers}


def _drift(how: str, net: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    if how == "rate":
        optimizer.param_groups[0]["lr"] = 0.011
    with torch.no_grad():
        for p in net.parameters():
            if how == "rounding":
                p.copy_(torch.nextafter(p, p + 1))
            if how == "last parameter" and p.dim() == 1 and p.numel() == 1:
                p.add_(0.5)
