"""What accumulation gains on two ranks: as estimated from a calibration, and as measured."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import quick


K, WINDOWS = 4, 5


def _step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), torch.zeros(()).expand(x.shape[0], 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def _wide() -> tuple[nn.Module, Tensor]:
    """4 M parameters, two samples."""
    return nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 1)), torch.randn(2, 2000)


def _deep() -> tuple[nn.Module, Tensor]:
    """40 k parameters, 4,000 samples."""
    layers = [nn.Sequential(nn.Linear(100, 100), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(100, 1)), torch.randn(4000, 100)


def estimate_and_measurement(rank: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in (("wide", _wide), ("deep", _deep)):
        torch.manual_seed(0)
        model, x = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        late = quick(_step, K)
        each = quick(_step, K, sync_each_batch=True)
        hardware = gradsync_fx.calibrate(late, model, optimizer, x)
        seconds: dict[str, list[float]] = {"late": [], "each": []}
        for _ in range(WINDOWS + 1):
            for way, step in (("late", late), ("each", each)):
                torch.distributed.barrier()
                start = time.perf_counter()
                for _ in range(K):
                    step(model, optimizer, x)
                seconds[way].append(time.perf_counter() - start)
        typical = {way: statistics.median(times[1:]) for way, times in seconds.items()}
        predicted = late.report(hardware).predicted
        found[name] = {
            "predicted": predicted.window_synced / predicted.window,
            "measured": typical["each"] / typical["late"],
        }
        found["hardware"] = hardware
    return found
