"""What a case means, in plain eager PyTorch: one process that has the batches of all ranks. Nothing of gradsync_fx."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.fuzz.cases import (
    Case,
    Do,
    batch_of,
    clip,
    dtype_of,
    losses_of,
    model_of,
    scheduler_of,
    weight_of,
)
from tests.fuzz.play import Trace, snapshot, state_of
from tests.optimizers import OPTIMIZERS


@dataclass
class Window:
    """Sums of the open window. slots: calls and skips of a rank. terms: what was summed, over all ranks, by weight."""

    slots: int = 0
    weight: float = 0.0
    sums: dict[str, Tensor] = field(default_factory=dict)
    fed: set[int] = field(default_factory=set)  # ranks that had data


class Plain:
    def __init__(self, case: Case) -> None:
        self.case, self.k = case, case.k
        self.model = model_of(case)
        self.optimizer = OPTIMIZERS[case.optimizer](self.model.parameters())
        self.scheduler = scheduler_of(case, self.optimizer)
        self.window, self.fresh = Window(), [True] * case.ranks
        buffers = {name: b.clone() for name, b in self.model.named_buffers()}
        self.buffers = [{n: b.clone() for n, b in buffers.items()} for _ in range(case.ranks)]
        self.first_rank = buffers
        self.source = 0  # whose buffers count: the first rank that has data
        self.traces = [Trace() for _ in range(case.ranks)]

    def do(self, do: Do) -> None:
        if do.what == "call":
            self.call(do)
        elif do.what == "flush":
            if self.window.slots:
                self.update()
            if self.case.broadcast_buffers != "never":
                for rank in range(self.case.ranks):
                    self.give(rank, self.buffers[self.source])
                self.fresh = [False] * self.case.ranks
        elif do.what == "discard":
            self.window = Window()
        elif do.what == "steps" and not self.window.slots:
            self.k = do.k

    def call(self, do: Do) -> None:
        setting = self.case.broadcast_buffers
        self.window.fed |= {rank for rank, runs in enumerate(do.runs) if runs}
        if setting == "every" and any(do.runs):
            self.source = min(self.window.fed)
            for rank in range(self.case.ranks):
                self.give(rank, self.buffers[self.source])
        for rank, runs in enumerate(do.runs):
            if runs and setting == "window_start" and self.fresh[rank]:
                self.give(rank, self.first_rank)
                self.fresh[rank] = False
        for rank, runs in enumerate(do.runs):
            if runs:
                self.add(do, rank)
        self.window.slots += 1
        if self.window.slots >= self.k:
            self.update()

    def give(self, rank: int, buffers: dict[str, Tensor]) -> None:
        """Buffers of another rank."""
        self.buffers[rank] = {name: b.clone() for name, b in buffers.items()}

    def add(self, do: Do, rank: int) -> None:
        """One rank's micro-step."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers[rank][name])
        losses = losses_of(self.case, self.model, *batch_of(self.case, do, rank), do.branch)
        self.traces[rank].losses.append(float(losses[0]))
        sum(losses).backward()  # type: ignore[union-attr]
        self.buffers[rank] = {name: b.clone() for name, b in self.model.named_buffers()}
        weight = weight_of(do) if self.case.reduction == "weighted" else 1.0
        if not (self.case.skip_nonfinite and do.bad):
            self.window.weight += weight
            for name, p in self.model.named_parameters():
                if p.grad is not None:
                    wide = torch.float32 if dtype_of(self.case) is torch.bfloat16 else p.dtype
                    term = p.grad.to(wide) * weight
                    before = self.window.sums.get(name)
                    self.window.sums[name] = term if before is None else before + term
        self.model.zero_grad()

    def update(self) -> None:
        window, self.window = self.window, Window()
        self.source = min(window.fed, default=self.source)
        if not window.weight or not window.sums:
            return
        summing = self.case.reduction == "sum"
        divisor = float(self.case.ranks) if summing else window.weight
        for name, p in self.model.named_parameters():
            if name in window.sums:
                p.grad = (window.sums[name] / divisor).to(p.dtype)
        clip(self.case, self.model)
        self.optimizer.step()
        self.model.zero_grad()
        if self.scheduler is not None:
            self.scheduler.step()
        if self.case.broadcast_buffers == "window_start":
            self.fresh = [True] * self.case.ranks
            self.first_rank = {name: b.clone() for name, b in self.buffers[self.source].items()}
        for rank, trace in enumerate(self.traces):
            self.see(rank)
            trace.updates.append(snapshot(self.model))

    def see(self, rank: int) -> None:
        """The model as this rank holds it."""
        for name, buffer in self.model.named_buffers():
            buffer.copy_(self.buffers[rank][name])


def plain(case: Case) -> list[Trace]:
    """What each rank should see."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = Plain(case)
        torch.manual_seed(1)
        for do in case.script:
            run.do(do)
        for rank, trace in enumerate(run.traces):
            run.see(rank)
            trace.end = state_of(run.model, run.optimizer)
    return run.traces


def compare(case: Case, ours: list[Trace]) -> None:
    """Raises `AssertionError` where what the ranks saw is not what they should have seen."""
    for rank, (mine, theirs) in enumerate(zip(ours, plain(case), strict=True)):
        say = f"rank {rank}, {{}}".format
        assert len(mine.losses) == len(theirs.losses), say("calls")
        assert len(mine.updates) == len(theirs.updates), say(
            f"{len(mine.updates)} updates in place of {len(theirs.updates)}"
        )
        for i, (a, b) in enumerate(zip(mine.losses, theirs.losses, strict=True)):
            _close(case, torch.tensor(a), torch.tensor(b), say(f"loss {i}"))
        for i, (a_all, b_all) in enumerate(zip(mine.updates, theirs.updates, strict=True)):
            _all_close(case, a_all, b_all, say(f"after update {i}"))
        _all_close(case, mine.end, theirs.end, say("in the end"))
        for i, (a_all, b_all) in enumerate(zip(mine.updates, ours[0].updates, strict=True)):
            for name, a in a_all.items():
                if "running" not in name and "num_batches" not in name:
                    assert torch.equal(a, b_all[name]), say(f"{name}: replicas after update {i}")


def _all_close(case: Case, a: dict[str, Tensor], b: dict[str, Tensor], say: str) -> None:
    assert a.keys() == b.keys(), f"{say}: {sorted(a.keys() ^ b.keys())}"
    for name, tensor in a.items():
        _close(case, tensor, b[name], f"{say}, {name}")


def _close(case: Case, a: Tensor, b: Tensor, say: str) -> None:
    rtol = 10 * case.atol
    torch.testing.assert_close(
        a, b, atol=case.atol, rtol=rtol, equal_nan=True, msg=lambda text: f"{say}: {text}"
    )
