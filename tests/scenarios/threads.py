"""What a rank does in two threads."""

from __future__ import annotations

import threading

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradsync_fx.capture.patches import intercepting
from gradsync_fx.capture.trace_state import Observed


PATIENCE = 60.0


def ddp_beside_a_trace(rank: int) -> list[float]:
    """An eager step of DDP while another thread traces: its gradients are reduced."""
    ready, done = threading.Event(), threading.Event()

    def trace() -> None:
        with intercepting(Observed()):
            ready.set()
            assert done.wait(PATIENCE)

    model = nn.Linear(2, 1, bias=False)
    wrapped = DistributedDataParallel(model)
    thread = threading.Thread(target=trace)
    thread.start()
    assert ready.wait(PATIENCE)
    wrapped(torch.full((1, 2), float(rank))).sum().backward()
    done.set()
    thread.join()
    return model.weight.grad.flatten().tolist()
