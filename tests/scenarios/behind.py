"""Scripts whose ranks take the CPU for a device: programs mask an empty window, and the host learns it later."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

import gradsync_fx
from gradsync_fx.runtime import captured_facts
from gradsync_fx.runtime.captured_step import CapturedStep
from tests.drive import plain_step
from tests.scripts import play
from tests.truth import Rules, Script


def behind(rank: int, scripts: list[Script], rules: Rules, more: dict[str, Any]) -> dict[str, Any]:
    """As `play`, with the number of windows that were closed before it was known whether they counted."""
    with (
        mock.patch.object(captured_facts, "runs_behind", return_value=True),
        mock.patch.object(
            CapturedStep, "_close_masked", autospec=True, side_effect=CapturedStep._close_masked
        ) as masked,
    ):
        found = play(rank, scripts, rules, more)
    return found | {"masked": masked.call_count}


# What rank 0 alone may ask, or do, while the outcome of an update is awaited.
ALONE: dict[str, Callable[[dict[str, Any]], Any]] = {
    "sync_gradients": lambda held: held["step"].sync_gradients,
    "optimizer.state_dict()": lambda held: held["optimizer"].state_dict(),
    "step.state_dict()": lambda held: held["step"].state_dict(),
    "settle": lambda held: held["step"].settle(),
    "let go": lambda held: held.pop("step"),
}


def asked_alone(rank: int, how: str, drifts: bool) -> dict[str, Any]:
    """Two updates; rank 0 does something alone between them. drifts: rank 1 writes to a parameter before the first."""
    with mock.patch.object(captured_facts, "runs_behind", return_value=True):
        held = _trained_once(rank)
        if drifts and rank == 1:
            with torch.no_grad():
                held["model"].weight += 0.5
        if rank == 0:
            ALONE[how](held)
            gc.collect()
        # Another step begins meanwhile: its meetings are not taken for that one's.
        other = _trained_once(rank)
        dist.barrier()
        error = ""
        try:
            if how != "let go":
                held["step"](held["model"], held["optimizer"], *_batch(rank, 1))
        except gradsync_fx.RanksDisagreeError as failure:
            error = str(failure)
        ours = [p.detach().clone() for p in held["model"].parameters()]
        return {"ours": ours, "other": other["model"].weight.detach().clone(), "error": error}


def _trained_once(rank: int) -> dict[str, Any]:
    """A model, its optimizer and its step after one update, of which the host does not know yet."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = gradsync_fx.optimize(
        plain_step, gradient_accumulation_steps=1, skip_nonfinite=True, backend="aot_eager"
    )
    step(model, optimizer, *_batch(rank, 0))
    assert step._executor._awaited is not None
    return {"model": model, "optimizer": optimizer, "step": step}


def _batch(rank: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(10 * rank + number)
    return torch.randn(4, 8, generator=source), torch.randn(4, 1, generator=source)


def eager_updates(updates: int) -> list[torch.Tensor]:
    """The same updates by plain PyTorch, of both ranks' data."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for number in range(updates):
        x, y = (
            torch.cat(parts)
            for parts in zip(*(_batch(rank, number) for rank in range(2)), strict=True)
        )
        plain_step(model, optimizer, x, y)
    return [p.detach() for p in model.parameters()]
