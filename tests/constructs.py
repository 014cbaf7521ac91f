"""What users write into steps: each construct with what becomes of it. docs/constructs.md is made from this, and
test_constructs.py tries every row.

A row's function is called in the step, between the loss and `backward`. Outcomes:

    captured    traced as it stands
    moved       runs after the program, or was dropped; the report says which
    eager       refused by name; with on_unsupported="eager" the same windows run without the rewrite
    refused     refused by name, either way
"""

from __future__ import annotations

import json
import logging
import pickle
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint


log = logging.getLogger(__name__)
HEADINGS = {
    "captured": "Captured as it stands",
    "moved": "Moved after the program, or dropped",
    "eager": 'Refused by name; runs with `on_unsupported="eager"`',
    "refused": "Refused by name, either way",
}


@dataclass(frozen=True)
class Row:
    """A construct. inside: called in the step with (state, model, optimizer, output, loss)."""

    code: str
    outcome: str
    becomes: str
    inside: Callable[..., Any]
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor]
    prepare: Callable[[nn.Module], object]

    @property
    def name(self) -> str:
        return self.inside.__name__


class State:
    """What a trainer keeps beside the model."""

    def __init__(self) -> None:
        self.calls, self.total, self.losses, self.seen = 0, 0.0, list[float](), list[Any]()

    def update(self, value: float) -> None:
        self.total, self.calls = self.total + value, self.calls + 1

    def look(self, tensor: Tensor) -> None:
        self.seen.append(len(pickle.dumps(tensor)))


def mse(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return nn.functional.mse_loss(model(x), y)


def nothing(model: nn.Module) -> None:
    return None


ROWS: list[Row] = []


def row(
    code: str,
    outcome: str,
    becomes: str,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] = mse,
    prepare: Callable[[nn.Module], object] = nothing,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def add(inside: Callable[..., Any]) -> Callable[..., Any]:
        ROWS.append(Row(code, outcome, becomes, inside, loss, prepare))
        return inside

    return add


@row("`return loss.item()`, `float(loss)`", "captured", "a number that the program gives")
def item(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Any:
    return {"loss": loss.item(), "double": 2 * float(loss.detach())}


@row(
    "`meter.update(loss.item())`",
    "captured",
    "sums on the host; one capture more when its numbers first change",
)
def meter(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    state.update(loss.item())


@row(
    "`self.calls += 1`, `if self.calls % 2 == 0:`",
    "captured",
    "a number of the step from its second value on; a capture for each branch",
)
def counter(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    state.calls += 1
    if state.calls % 2 == 0:
        state.total += 1.0


@row(
    "`if random.random() < p:`, `x * rng.uniform(1, 2)`, `random.choice(layers)(x)`",
    "captured",
    "drawn ahead of the program, as in eager PyTorch; a capture for each way that the branches come out, at most 64",
)
def drawn(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    if random.random() < 0.5:
        state.total += 1.0


@row(
    "`if torch.rand([]) < p:`, `if torch.randint(2, (1,)).item():`",
    "captured",
    "likewise, on the CPU: it is drawn before the program's own random numbers (dropout)",
)
def drawn_tensor(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    if torch.rand([]) < 0.5:
        state.total += 1.0


@row("`assert x.shape[0] == 4`", "captured", "checked when the step is traced")
def assert_shape(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    if loss.ndim != 0:
        raise AssertionError("a loss of one element")


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g * 2


@row(
    "a `torch.autograd.Function`",
    "captured",
    "its forward and backward are traced",
    lambda m, x, y: mse(m, Double.apply(x), y),
)
def own_function(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None: ...


@row(
    "`checkpoint(block, x, use_reentrant=False)`",
    "captured",
    "the block is computed again in backward",
    lambda m, x, y: nn.functional.mse_loss(checkpoint(m, x, use_reentrant=False), y),
)
def checkpointed(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None: ...


@row(
    "`torch.autocast(...)`",
    "captured",
    "casts are part of the program",
    lambda m, x, y: _autocast(m, x, y),
)
def autocast(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None: ...


def _autocast(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return nn.functional.mse_loss(model(x).float(), y)


@row("`print(...)`", "moved", "runs after the program, with its numbers")
def prints(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    print(f"loss {loss.item():.3f}")


@row("`logger.info(...)`", "moved", "runs after the program")
def logs(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    log.debug("loss %.3f", loss.item())
    logging.debug("loss %.3f", loss.item())


@row(
    "`losses.append(loss.item())`",
    "moved",
    "runs after the program; costs no trace, unless the step reads the list too",
)
def appends(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    state.losses.append(loss.item())


@row(
    "`bar.update(1)`, `metric.update(out.detach())`, `writer.add_scalar(...)`",
    "moved",
    "a call that cannot be traced, whose result nobody uses, and which reaches nothing that the step is made of: runs "
    "after the program, watched",
)
def untraceable(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    state.look(loss.detach())


@row("`time.perf_counter()`", "moved", "NaN: a step is one program; take the time around it")
def clock(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Any:
    start = time.perf_counter()
    return {"loss": loss, "seconds": time.perf_counter() - start}


@row(
    "`if loss.item() > 3:`, `if torch.isnan(loss):`",
    "eager",
    "a branch on a value that only the program knows",
)
def data_dependent(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    if loss.item() > 1e9:
        state.total += 1.0


@row(
    "`value = library(loss)`, used later",
    "eager",
    "a call that cannot be traced, and whose result the step uses",
)
def used(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Any:
    return {"loss": loss, "size": len(pickle.dumps(loss.detach()))}


@row(
    "`logits.tolist()`, `json.dumps(...)` of values",
    "eager",
    "Python objects made of a tensor's values",
)
def to_list(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> Any:
    return {"loss": loss, "text": json.dumps(loss.tolist())}


@row(
    "`clip_by_history(model)`, `seed_all(n)`, not traced",
    "eager",
    "a call that cannot be traced, and that reaches a parameter, a gradient, an optimizer or a random generator",
)
def reaches(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    state.look(next(model.parameters()))


@row("`net.requires_grad_(False)` in the step", "eager", "which parameters have gradients changes")
def toggled(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    model.requires_grad_(False)
    model.requires_grad_(True)


@row('`group["lr"] = ...` in the step', "eager", "the update would come before it")
def own_schedule(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.05


@row(
    "`checkpoint(block, x, use_reentrant=True)`",
    "eager",
    "its backward runs outside of the graph",
    lambda m, x, y: nn.functional.mse_loss(
        checkpoint(m, x.requires_grad_(), use_reentrant=True), y
    ),
)
def reentrant(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None: ...


@row(
    "`GradScaler` that is enabled",
    "refused",
    "its check decides in the middle of the update: use bfloat16, or `skip_nonfinite=True`",
)
def scaler(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None:
    SCALER.scale(loss)


SCALER = torch.amp.GradScaler("cpu")


@row(
    "`p.register_hook(...)` on a parameter",
    "refused",
    "it would not run: do its work between `backward()` and `optimizer.step()`",
    prepare=lambda model: next(model.parameters()).register_hook(lambda g: g),
)
def hook(state: State, model: nn.Module, optimizer: Optimizer, loss: Tensor) -> None: ...


def table() -> Iterator[str]:
    """The rows as Markdown."""
    for outcome, heading in HEADINGS.items():
        yield from ("", f"## {heading}", "", "| in the step | what becomes of it |", "|---|---|")
        for found in ROWS:
            if found.outcome == outcome:
                yield f"| {found.code} | {found.becomes} |"
