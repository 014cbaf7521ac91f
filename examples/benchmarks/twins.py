"""A training run twice: as an eager loop that accumulates by hand, and as gradsync_fx runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync_fx
from workloads import WORKLOADS, batches


WINDOW = 4
CALLS = 2 * WINDOW + 2  # two windows, and a shorter one that `flush` closes


@dataclass(frozen=True)
class Case:
    """What is trained. weights: of micro-batches, drawn. skips: one micro-step is not finite, and is left out."""

    workload: str
    clip: bool = False
    weights: bool = False
    skips: bool = False
    bf16: bool = False
    quick: bool = True

    def __str__(self) -> str:
        flags = ("clip", "weights", "skips", "bf16")
        return ", ".join([self.workload, "AdamW", *(f for f in flags if getattr(self, f))])

    @property
    def options(self) -> dict[str, Any]:
        """Of `optimize`."""
        return {
            "gradient_accumulation_steps": WINDOW,
            "reduction": "weighted" if self.weights else "mean",
            "skip_nonfinite": self.skips,
        }

    def parts(self, device: torch.device) -> tuple[nn.Module, Any, Any]:
        """Model, optimizer and scheduler: equal for all who ask."""
        torch.manual_seed(0)
        model = WORKLOADS[self.workload](self.quick).build().to(device)
        # A large eps: an update depends on the gradient's size, and small differences of gradients stay small.
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    def calls(self, device: torch.device, count: int = CALLS, rank: int = 0) -> list[Any]:
        """Batch, weight and a factor of the loss, for each micro-step of a rank."""
        data = batches(WORKLOADS[self.workload](self.quick), rank, count, device)
        weights = torch.arange(1.0, count + 1, device=device) + rank
        factors = torch.ones(count, device=device)
        if self.skips:
            factors[1] = float("inf")
        return list(zip(data, weights, factors, strict=True))

    def loss(self) -> Callable[[nn.Module, Any, Tensor], Tensor]:
        """Of a model, a batch and its factor."""
        plain, bf16 = WORKLOADS[self.workload](self.quick).loss, self.bf16

        def loss(model: nn.Module, batch: Any, factor: Tensor) -> Tensor:
            with torch.autocast(factor.device.type, dtype=torch.bfloat16, enabled=bf16):
                return plain(model, batch) * factor

        return loss

    def step(self) -> Any:
        """The plain train step."""
        loss_of, weighs, clips = self.loss(), self.weights, self.clip

        def train_step(model, optimizer, batch, weight, factor):
            if weighs:
                gradsync_fx.micro_batch_weight(weight)
            loss = loss_of(model, batch, factor)
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return train_step


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def start_of(case: Case) -> list[Tensor]:
    """The parameters before the first update."""
    return values(case.parts(torch.device("cpu"))[0])


def eager(case: Case, device: torch.device, count: int = CALLS, rank: int = 0) -> list[Tensor]:
    """The parameters at the end of a loop in plain PyTorch; ranks of a group add up their gradients themselves."""
    model, optimizer, scheduler = case.parts(device)
    total, loss_of = torch.zeros((), device=device), case.loss()
    for i, (batch, weight, factor) in enumerate(case.calls(device, count, rank), 1):
        if factor.isfinite():
            share = weight if case.weights else torch.ones_like(weight)
            (loss_of(model, batch, factor) * share).backward()
            total += share
        if i % WINDOW and i < count:
            continue
        held = [p.grad for p in model.parameters() if p.grad is not None]
        if dist.is_initialized():
            for tensor in (*held, total):
                dist.all_reduce(tensor)
        for gradient in held:
            gradient /= total
        if case.clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        total.zero_()
    return values(model)


def accumulated(
    case: Case, device: torch.device, count: int = CALLS, rank: int = 0, **options: Any
) -> list[Tensor]:
    """The parameters at the end of the same run by gradsync_fx."""
    model, optimizer, scheduler = case.parts(device)
    step = gradsync_fx.optimize(case.step(), **case.options, **options)
    for call in case.calls(device, count, rank):
        step(model, optimizer, *call)
        if step.sync_gradients:
            scheduler.step()
    step.flush(on_update=scheduler.step)
    return values(model)
