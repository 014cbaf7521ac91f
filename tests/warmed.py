"""Imports and traces, once, all that a forked rank needs: importing this is what it is for (mortals.py)."""

from __future__ import annotations

import torch

import gradsync_fx
from tests.scenarios.faults import Backend, fresh, script_of
from tests.scripts import plain


def _warm() -> None:
    torch.set_num_threads(1)
    model, optimizer = fresh()
    step = gradsync_fx.optimize(plain, gradient_accumulation_steps=2, backend=Backend(None))
    for slot in script_of(0)[:2]:
        assert slot is not None
        step(model, optimizer, *slot.batch(), slot.branch)


_warm()
