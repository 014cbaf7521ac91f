"""What each of two ranks compiled for a small step, and what it loaded."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

from torch._dynamo.utils import counters

import gradsync_fx
from tests.drive import plain_step
from tests.reference import regression
from tests.scenarios.groups import fresh, parameters


def from_a_cold_cache(rank: int, folder: str, options: dict[str, Any]) -> dict[str, Any]:
    """Parameters after a window of two, and how often Inductor's cache of graphs was asked in vain and not."""
    model, optimizer = fresh()
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, **options)
    with mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder):
        counters["inductor"].clear()
        for batch in regression(1, 2, seed=rank)[0]:
            step(model, optimizer, *batch)
        asked = {which: counters["inductor"][f"fxgraph_cache_{which}"] for which in ("miss", "hit")}
    return {**asked, "parameters": parameters(model)}
