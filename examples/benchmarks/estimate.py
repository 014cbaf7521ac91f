"""The report's estimate beside a measurement: what accumulation gains on the ranks of this job.

    torchrun --nproc-per-node 2 examples/benchmarks/estimate.py

Two models, one of many parameters and few FLOPs (wide), one of the reverse (deep); windows of four micro-steps, reduced
once and in every micro-step, in turn. Estimate and measurement should agree in order, and roughly in size.
"""

from __future__ import annotations

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

import gradsync_fx


sys.path.append(str(Path(__file__).resolve().parent.parent))  # what the examples share
from launch import device, moved, ranks  # known only from here on


K, WINDOWS = 4, 9


def step(model: nn.Module, optimizer: Optimizer, x: Tensor) -> Tensor:
    loss = F.mse_loss(model(x), x.new_zeros(()).expand(x.shape[0], 1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def wide() -> tuple[nn.Module, Tensor]:
    """4 M parameters, two samples."""
    return nn.Sequential(nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 1)), torch.randn(2, 2000)


def deep() -> tuple[nn.Module, Tensor]:
    """40 k parameters, 4,000 samples."""
    layers = [nn.Sequential(nn.Linear(100, 100), nn.ReLU()) for _ in range(4)]
    return nn.Sequential(*layers, nn.Linear(100, 1)), torch.randn(4000, 100)


def ratios(model: nn.Module, x: Tensor) -> tuple[float, float]:
    """Seconds of a window that reduces in every micro-step over those of one that reduces once: estimated, measured."""
    optimizer = SGD(model.parameters(), lr=1e-6)
    late = gradsync_fx.optimize(step, gradient_accumulation_steps=K)
    each = gradsync_fx.optimize(step, gradient_accumulation_steps=K, sync_each_batch=True)
    hardware = gradsync_fx.calibrate(late, model, optimizer, x)
    seconds: dict[str, list[float]] = {"late": [], "each": []}
    for _ in range(WINDOWS + 1):
        for way, run in (("late", late), ("each", each)):
            dist.barrier()
            _finish()
            start = time.perf_counter()
            for _ in range(K):
                run(model, optimizer, x)
            _finish()
            seconds[way].append(time.perf_counter() - start)
    typical = {way: statistics.median(times[1:]) for way, times in seconds.items()}
    predicted = late.report(hardware).predicted
    return predicted.window_synced / predicted.window, typical["each"] / typical["late"]


def _finish() -> None:
    """Waits for the card, where the rank has one."""
    if device().type != "cpu":
        torch.accelerator.synchronize()


def main() -> None:
    with ranks(joined=True) as (rank, _):
        for make in (wide, deep):
            torch.manual_seed(0)
            estimated, measured = ratios(*moved(make()))
            if rank == 0:
                print(f"{make.__name__}: estimated {estimated:.2f} x, measured {measured:.2f} x")


if __name__ == "__main__":
    main()
