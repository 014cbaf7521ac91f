"""A case of the fuzzer: plain data, from which a model, a step, batches and everything else are made.

Models have no parameter whose gradient is zero but for rounding (a bias before a norm): Adam makes steps of full size
from such noise, in eager as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.optimizers import OPTIMIZERS


@dataclass(frozen=True)
class Do:
    """One thing that a run does on every rank. what: "call", "flush", "discard", "reload" or "steps".

    runs: for a call, which of the ranks have data; the others skip. seed: of its batches. rows: of each. k: of "steps".
    """

    what: str
    seed: int = 0
    runs: tuple[bool, ...] = (True,)
    rows: int = 4
    branch: str = "both"
    bad: bool = False
    k: int = 1


@dataclass(frozen=True)
class Case:
    """What is trained, how, and what happens on the way."""

    model: str
    optimizer: str
    k: int
    script: tuple[Do, ...]
    reduction: str = "mean"
    dtype: str = "float64"
    loss: str = "one"
    zero: str = "after"
    zeroed: str = "optimizer"
    clip: str = "none"
    schedule: str = "none"
    weight: str = "number"
    wrap: str = "plain"
    ranks: int = 1
    skip_nonfinite: bool = False
    bucket_cap_mb: float = 25.0
    broadcast_buffers: str = "window_start"
    sync_each_batch: bool = False
    way: str = "captured"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "backend": "aot_eager",
            "gradient_accumulation_steps": self.k,
            "reduction": self.reduction,
            "skip_nonfinite": self.skip_nonfinite,
            "bucket_cap_mb": self.bucket_cap_mb,
            "broadcast_buffers": self.broadcast_buffers,
            "sync_each_batch": self.sync_each_batch,
        }

    @property
    def atol(self) -> float:
        return {"float64": 1e-8, "float32": 3e-4, "bfloat16": 6e-2}[self.dtype]


class Branching(nn.Module):
    """A trunk, two heads, and a layer that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.a, self.b = nn.Linear(6, 5), nn.Linear(5, 3), nn.Linear(5, 3)
        self.idle = nn.Linear(2, 2)

    def forward(self, x: Tensor, branch: str) -> Tensor:
        hidden = torch.tanh(self.trunk(x))
        if branch == "a":
            return self.a(hidden)
        return self.b(hidden) if branch == "b" else self.a(hidden) * self.b(hidden)


class Attending(nn.Module):
    """Tokens, one layer of attention, and a head that is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.mix, self.norm = nn.Linear(8, 24, bias=False), nn.LayerNorm(8)
        self.head = nn.Linear(8, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = self.mix(x).chunk(3, -1)
        x = self.norm(x + F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return self.head(x).mean(1)


class Twice(nn.Module):
    """One layer that is used twice, and a scale of no dimension."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.inner(torch.tanh(self.inner(x)))) * self.scale)


class Pooling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(tokens).mean(1)))


def _conv(norm: nn.Module) -> nn.Module:
    layers = (nn.Conv2d(1, 4, 3, bias=False), norm, nn.SiLU(), nn.Flatten(), nn.Linear(16, 3))
    return nn.Sequential(nn.Unflatten(1, (1, 4)), *layers)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)),
    "conv": lambda: _conv(nn.GroupNorm(2, 4)),
    "conv-batch": lambda: _conv(nn.BatchNorm2d(4)),
    "norms": lambda: nn.Sequential(
        nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 3)
    ),
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 3)),
    "attention": Attending,
    "embedding": Pooling,
    "twice": Twice,
    "branches": Branching,
}
TOKENS = ("attention", "embedding")
STATISTICS = ("conv-batch", "norms")
# For coarse dtypes: updates that do not divide by a gradient's size.
GENTLE = ("SGD", "momentum", "decay", "dampening", "nesterov", "maximize", "own-group")
ANY = tuple(OPTIMIZERS)
LOSSES = ("one", "absolute", "two", "twice", "divided")
SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda n: 1.0 / (n + 1)),
}


def dtype_of(case: Case) -> torch.dtype:
    found = getattr(torch, case.dtype)
    assert isinstance(found, torch.dtype)
    return found


def model_of(case: Case) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[case.model]().to(dtype_of(case))


def batch_of(case: Case, do: Do, rank: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(2 * do.seed + rank)
    if case.model in TOKENS:
        x = torch.randint(7, (do.rows, 5), generator=source)
    else:
        shape = (4, 4) if case.model.startswith("conv") else (6,)
        x = torch.randn(do.rows, *shape, generator=source).to(dtype_of(case))
        if do.bad:
            x.view(-1)[0] = math.nan
    width = 7 if case.model == "attention" else 3
    return x, torch.randn(do.rows, width, generator=source).to(dtype_of(case))


def losses_of(case: Case, model: nn.Module, x: Tensor, y: Tensor, branch: str) -> list[Tensor]:
    """The losses of a micro-batch, each to be given to `backward` on its own."""
    out = model(x, branch) if case.model == "branches" else model(x)
    if case.loss == "absolute":
        return [F.smooth_l1_loss(out, y)]
    if case.loss == "two":
        return [F.mse_loss(out, y) + 0.1 * F.cross_entropy(out, y.argmax(-1))]
    if case.loss == "twice":
        return [F.mse_loss(out, y), 0.1 * out.square().mean()]
    return [F.mse_loss(out, y) / (3 if case.loss == "divided" else 1)]


def weight_of(do: Do) -> float:
    return float(do.rows)


def clip(case: Case, model: nn.Module) -> None:
    if case.clip == "norm":
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    elif case.clip == "value":
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
    elif case.clip == "infinity":
        nn.utils.clip_grad_norm_(model.parameters(), 0.02, norm_type=math.inf)


def step_of(case: Case) -> Callable[..., Tensor]:
    """The training step, as its user writes it."""

    def step(
        model: nn.Module, optimizer: Any, scheduler: Any, x: Tensor, y: Tensor, branch: str
    ) -> Tensor:
        owner = model if case.zeroed == "model" else optimizer
        if case.zero in ("before", "both"):
            owner.zero_grad()
        if case.reduction == "weighted" and case.weight == "number":
            gradsync_fx.micro_batch_weight(x.shape[0])
        losses = losses_of(case, model, x, y, branch)
        if case.zero == "between":
            owner.zero_grad()
        for i, loss in enumerate(losses):
            loss.backward(retain_graph=i + 1 < len(losses))
        if case.wrap == "hand":
            for p in model.parameters():
                if p.grad is not None:
                    dist.all_reduce(p.grad)
                    p.grad.div_(2)
        clip(case, model)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if case.zero in ("after", "both"):
            owner.zero_grad()
        if case.reduction == "weighted" and case.weight == "tensor":
            gradsync_fx.micro_batch_weight(torch.ones_like(y[:, 0]).sum())
        return losses[0]

    return step


def scheduler_of(case: Case, optimizer: Optimizer) -> Any:
    return None if case.schedule == "none" else SCHEDULES[case.schedule](optimizer)
