"""Parameters that arrive under the next call's forward, beside a run where they are there when a call ends."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.comm.arrivals import ARRIVALS
from tests.scenarios import sharded


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3)
    )


def _batch(rank: int, number: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(6, 8, generator=source), torch.randint(0, 3, (6,), generator=source)


class Run:
    """One optimized step, with what it trains. clip: the largest norm, or None. average: a copy kept in the step."""

    def __init__(
        self,
        rank: int,
        name: str,
        k: int,
        *,
        hides: bool,
        clip: float | None,
        average: bool = False,
        **more: Any,
    ) -> None:
        self.rank, self.calls = rank, 0
        self.model = _model()
        self.optimizer = sharded.made(name, self.model)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.8)
        self.average = copy.deepcopy(self.model) if average else None

        def train_step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
            if self.average is not None:
                with torch.no_grad():
                    for kept, p in zip(self.average.parameters(), model.parameters(), strict=True):
                        kept.lerp_(p, 0.1)
            return loss

        self.step = gradsync_fx.optimize(
            train_step,
            gradient_accumulation_steps=k,
            shard_optimizer=True,
            overlap_param_gather=hides,
            bucket_cap_mb=1e-3,
            **more,
        )

    def call(self) -> float:
        x, y = _batch(self.rank, self.calls)
        self.calls += 1
        loss = float(self.step(self.model, self.optimizer, x, y))
        if self.step.sync_gradients:
            self.scheduler.step()
        return loss

    def values(self) -> list[Tensor]:
        """As they lie there."""
        kept = [p.detach().clone() for p in self.model.parameters()]
        if self.average is not None:
            kept += [p.detach().clone() for p in self.average.parameters()]
        return kept


def trained(
    rank: int, name: str, k: int, hides: bool, clip: float | None, more: dict[str, Any]
) -> dict[str, Any]:
    """Three windows and the beginning of a fourth, which is flushed."""
    run = Run(rank, name, k, hides=hides, clip=clip, **more)
    losses, away = [], []
    for _ in range(3 * k + max(k - 1, 1)):
        losses.append(run.call())
        away.append(len(ARRIVALS))
    run.step.flush()
    left = len(ARRIVALS)
    return {"losses": losses, "away": away, "left": left, "values": run.values()}


Read = Callable[[Run], Any]


def _saved(run: Run) -> Any:
    file = io.BytesIO()
    torch.save(run.model.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def _collected(run: Run) -> None:
    del run.step
    gc.collect()


def _loaded(run: Run) -> None:
    run.model.load_state_dict(
        {n: torch.full_like(p, 0.25) for n, p in run.model.named_parameters()}
    )


# What settles by itself, or by hand.
READS: dict[str, Read] = {
    "settle": lambda run: run.step.settle(),
    "forward": lambda run: run.model(_batch(0, 0)[0]),
    "forward of a part": lambda run: run.model[0](_batch(0, 0)[0]),
    "state_dict of the model": _saved,
    "state_dict of the optimizer": lambda run: run.optimizer.state_dict(),
    "state_dict of the step": lambda run: run.step.state_dict(),
    "flush": lambda run: run.step.flush(),
    "report": lambda run: run.step.report(),
    "self_check": lambda run: run.step.self_check(run.model, run.optimizer, *_batch(run.rank, 0)),
    "load_state_dict": _loaded,
    "end of the step": _collected,
}
LAST = "end of the step"


def _two(rank: int) -> tuple[Run, Run]:
    """After one call, and after two of a run without hiding: its programs wait for all that is on its way."""
    run, plain = (Run(rank, "AdamW", 1, hides=hides, clip=None) for hides in (True, False))
    for one in (plain, plain, run):
        one.call()
    return run, plain


def reads(rank: int) -> dict[str, dict[str, Any]]:
    """For each way to read an update and the read: what was there before it and after it, and without hiding."""
    run, plain = _two(rank)
    found = {}
    for how, read in READS.items():
        before = run.values()
        run.call()
        there, away = run.values(), len(ARRIVALS)
        result = read(run)
        wanted = read(plain) if how.startswith(("forward", "load")) else None
        hooks = sum(
            len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) for m in run.model.modules()
        )
        found[how] = {
            "before": before,
            "there": there,
            "away": away,
            "after": run.values(),
            "left": len(ARRIVALS),
            "hooks": hooks,
            "plain": plain.values(),
            "result": result if isinstance(wanted, Tensor) else None,
            "wanted": wanted,
        }
        if how not in LAST:
            plain.call()
    return found


def written(rank: int) -> dict[str, Any]:
    """A write to a parameter that is on its way; then the way out."""
    run, plain = _two(rank)
    run.call()
    with torch.no_grad():
        run.model[0].weight.clamp_(-0.1, 0.1)
    said = []
    for use in (run.call, run.step.settle):
        try:
            use()
        except gradsync_fx.WindowError as error:
            said.append(str(error))
    ARRIVALS.settle()
    other = Run(rank, "AdamW", 1, hides=True, clip=None)
    for _ in range(2):
        other.call()
    other.step.settle()
    for one in (other, plain):
        with torch.no_grad():
            one.model[0].weight.clamp_(-0.1, 0.1)
        one.call()
    other.step.settle()
    return {"said": said, "values": other.values(), "plain": plain.values()}
