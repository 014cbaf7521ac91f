"""Whoever reads parameters between calls finds them in place: modules that hold some on their way are watched.

The forward of such a module outside of the step, its `state_dict` and `load_state_dict` settle first. A program that
was captured calls no hook: it has ops of its own for that (passes/hide_gathers.py). The hooks are there as long as
something is on its way.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from gradsync_fx.comm.arrivals import ARRIVALS


def watch_reads(modules: Iterable[nn.Module]) -> None:
    """modules: those that hold parameters which are on their way."""
    if not len(ARRIVALS):
        return
    handles = []
    for module in modules:
        handles += [
            module.register_forward_pre_hook(_settle),
            module.register_state_dict_pre_hook(_settle),
            module.register_load_state_dict_pre_hook(_settle),
        ]

    def leave() -> None:
        for handle in handles:
            handle.remove()

    ARRIVALS.when_empty(leave)


def _settle(*_: Any) -> None:
    if not torch.compiler.is_compiling():  # a trace reads no values
        ARRIVALS.check()
        ARRIVALS.settle()
