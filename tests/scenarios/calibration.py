"""What accumulation gains on two ranks, as estimated from a calibration of this machine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import SGD

import gradsync_fx
from tests.drive import plain_step, quick


def estimated(rank: int) -> dict[str, Any]:
    """Of a model of many parameters and few FLOPs (wide), and one of few parameters and many FLOPs (deep)."""
    found: dict[str, Any] = {}
    narrow = [nn.Sequential(nn.Linear(100, 100), nn.ReLU()) for _ in range(4)]
    for name, layers, samples in (
        ("wide", [nn.Linear(2000, 2000), nn.ReLU(), nn.Linear(2000, 1)], 2),
        ("deep", [*narrow, nn.Linear(100, 1)], 4000),
    ):
        torch.manual_seed(0)
        model = nn.Sequential(*layers)
        for parameter in model.parameters():
            torch.distributed.broadcast(parameter.detach(), 0)
        x = torch.randn(samples, 2000 if name == "wide" else 100)
        step = quick(plain_step, 4)
        arguments = model, SGD(model.parameters(), lr=1e-6), x, torch.zeros(samples, 1)
        hardware = gradsync_fx.calibrate(step, *arguments)
        predicted = step.report(hardware).predicted
        found[name] = predicted.window_synced / predicted.window
        found["hardware"] = hardware
    return found
