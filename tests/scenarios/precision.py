"""What goes over the wire."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from tests.drive import drive, plain_step, quick, step_of
from tests.models import Lin, mlp
from tests.reference import accumulation
from tests.scenarios.common import data_of


def on_the_wire(rank: int, wire: torch.dtype) -> tuple[float, dict[str, torch.dtype]]:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, reduce_dtype=wire)
    for x in ((256.0, 1.0), (1.0, 2.0))[rank]:
        step(model, optimizer, torch.tensor(x))
    return model.w.item(), {name: t.dtype for name, t in step.gradients().items()}


def large(rank: int) -> float:
    model = Lin()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = quick(step_of(lambda model, x: model(x)), 2, reduce_dtype=torch.float16)
    for _ in range(2):
        step(model, optimizer, torch.tensor(40000.0))
    return model.w.item()


def compressed(rank: int, hook: str) -> dict[str, Any]:
    """DDP with torch's own compression hook: ours, and eager DDP with that hook."""
    ours = mlp()
    eager = copy.deepcopy(ours)
    plain = quick(plain_step, 2)
    third = copy.deepcopy(ours)
    found = []
    for net in (ours, eager):
        model = DistributedDataParallel(net)
        model.register_comm_hook(None, getattr(default_hooks, hook))
        found.append((model, torch.optim.SGD(model.parameters(), lr=0.1)))
    data = data_of(rank, 3, 2)
    step = quick(plain_step, 2)
    drive(step, *found[0], data)
    accumulation(*found[1], data)
    drive(plain, third, torch.optim.SGD(third.parameters(), lr=0.1), data)
    return {
        "ours": [p.detach() for p in ours.parameters()],
        "eager": [p.detach() for p in eager.parameters()],
        "bytes": step.report().bytes_after,
        "plain_bytes": plain.report().bytes_after,
    }
