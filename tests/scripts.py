"""Plays scripts (truth.py) with gradsync_fx: on one rank in this process, or as the scenario of each of two ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.counting import counted
from tests.truth import Rules, Script, truth


class Two(nn.Module):
    """A trunk and two heads; a branch trains the trunk and one head, or both."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(8, 8)
        self.a = nn.Linear(8, 1)
        self.b = nn.Linear(8, 1)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if branch == "a":
            return self.a(hidden)
        return self.b(hidden) if branch == "b" else self.a(hidden) + self.b(hidden)


def loss_of(model: nn.Module, x: Tensor, y: Tensor, branch: str) -> Tensor:
    return nn.functional.mse_loss(model(x, branch), y)


def plain(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, branch: str) -> Tensor:
    loss = loss_of(model, x, y, branch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def weighed(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, branch: str) -> Tensor:
    gradsync_fx.micro_batch_weight(x.shape[0])
    return plain(model, optimizer, x, y, branch)


def weighed_by_tensor(
    model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, branch: str
) -> Tensor:
    loss = plain(model, optimizer, x, y, branch)
    gradsync_fx.micro_batch_weight(torch.ones_like(x[:, 0]).sum())
    return loss


def clipped(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, branch: str) -> Any:
    loss = loss_of(model, x, y, branch)
    loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    optimizer.step()
    optimizer.zero_grad()
    return loss, norm


STEPS = {f.__name__: f for f in (plain, weighed, weighed_by_tensor, clipped)}
OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2),
}


def play(
    rank: int,
    scripts: list[Script],
    rules: Rules,
    more: dict[str, Any],
) -> dict[str, Any]:
    """This rank's script, a flush, and the truth beside it.

    more: names of `step` and `optimizer`, further `options`. asked: whether it looks for an update after each call;
    else "ours" is the end alone. collectives: all-reduces and gathers of each call.
    """
    step, optimizer = more.get("step", "plain"), more.get("optimizer", "sgd")
    options = {"backend": "aot_eager", **more.get("options", {})}
    torch.manual_seed(0)
    model = Two()
    other = copy.deepcopy(model)
    mine = OPTIMIZERS[optimizer](model.parameters())
    run = gradsync_fx.optimize(
        STEPS[step],
        gradient_accumulation_steps=rules.k,
        reduction=rules.reduction,
        skip_nonfinite=rules.skip_nonfinite,
        **options,
    )
    script = scripts[rank]
    branches = {slot.branch for s in scripts for slot in s if slot is not None}
    for branch in sorted(branches):
        run.prepare(model, mine, torch.zeros(4, 8), torch.zeros(4, 1), branch)
    states: list[dict[str, Tensor]] = []
    outputs, collectives = [], []

    def record() -> None:
        states.append({name: t.clone() for name, t in model.state_dict().items()})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", gradsync_fx.GradSyncWarning)
        for slot in script:
            with counted() as count:
                if slot is None:
                    run.skip()
                else:
                    outputs.append(run(model, mine, *slot.batch(), slot.branch))
            collectives.append((count.all_reduces, count.all_gathers))
            if more.get("asked", True) and run.sync_gradients:
                record()
        run.flush(on_update=record)
        warned = [str(w.message) for w in caught]
    if not more.get("asked", True):
        states = []
        record()
    assert run.pending == 0
    assert all(float(g.abs().max()) == 0.0 for g in run.gradients().values())
    theirs = OPTIMIZERS[optimizer](other.parameters())

    def clip() -> None:
        nn.utils.clip_grad_norm_(other.parameters(), 0.05)

    before = clip if step == "clipped" else None
    return {
        "ours": states,
        "truth": truth(other, theirs, scripts, rules, loss_of, before),
        "outputs": outputs,
        "collectives": collectives,
        "warnings": warned,
        "steps": run.optimizer_step,
        "compiled": run.compile_count,
        "unused": run.report().unused_parameters,
        "counts": [
            {n: float(o.state[p].get("step", 0)) for n, p in m.named_parameters()}
            for m, o in ((model, mine), (other, theirs))
        ],
        "state": sorted(
            name for name, p in model.named_parameters() if p in mine.state and mine.state[p]
        ),
    }
