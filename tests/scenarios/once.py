"""Models of which much depends on parameters alone, trained in windows beside plain eager accumulation."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.planning import worth


WIDTH, BATCH = 12, 5
Wrote = Callable[[nn.Module, Optimizer], object]


@contextmanager
def all_of_it() -> Iterator[None]:
    """Holds whatever can be held: models of tests are too small for anything to pay."""
    with mock.patch.object(worth, "pays", return_value=True):
        yield


class _Quantised(nn.Module):
    """Straight through: as if the weight were rounded."""

    def forward(self, w: Tensor) -> Tensor:
        scale = w.detach().abs().amax(1, keepdim=True) / 7
        return w + (torch.round(w / scale).clamp(-7, 7) * scale - w).detach()


class _FakeQuantised(nn.Module):
    """Nothing goes back where the weight is out of range."""

    def forward(self, w: Tensor) -> Tensor:
        scale = w.detach().abs().amax(1) / 5
        zero = torch.zeros(w.shape[0], dtype=torch.int32)
        return torch.fake_quantize_per_channel_affine(w, scale, zero, 0, -4, 4)


class _Merged(nn.Module):
    """A low-rank change, merged into the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.randn(3, WIDTH) * 0.3)
        self.b = nn.Parameter(torch.randn(WIDTH, 3) * 0.3)

    def forward(self, w: Tensor) -> Tensor:
        return w + 0.5 * self.b @ self.a


class _TwoWays(nn.Module):
    """One weight, scaled to rows of one length, and as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.4)
        self.length = nn.Parameter(torch.rand(WIDTH, 1) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        scaled = self.length * self.weight / self.weight.norm(dim=1, keepdim=True)
        return F.linear(x, scaled) - F.linear(x.tanh(), self.weight)


class _Rotated(nn.Module):
    """A table made of a buffer."""

    angles: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.linspace(0.1, 2.0, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.angles.cos().exp() + x.roll(1, -1) * self.angles.sin().exp()


def layer(kind: str) -> nn.Module:
    if kind == "two ways":
        return _TwoWays()
    if kind == "rotary":
        return nn.Sequential(_Rotated(), nn.Linear(WIDTH, WIDTH))
    if kind == "convolution":
        return nn.Sequential(
            nn.Unflatten(1, (1, WIDTH)), weight_norm(nn.Conv1d(1, 2, 3, padding=1)), nn.Flatten(),
            nn.Linear(2 * WIDTH, WIDTH),
        )  # fmt: skip
    linear: nn.Module = nn.Linear(WIDTH, WIDTH)
    if kind == "weight norm":
        return weight_norm(linear)
    if kind == "spectral norm":
        return spectral_norm(linear).eval()
    made: nn.Module = {"merged": _Merged, "quantised": _Quantised, "fake": _FakeQuantised}[kind]()
    parametrize.register_parametrization(linear, "weight", made)
    return linear


KINDS = (
    "weight norm", "spectral norm", "merged", "quantised", "fake", "two ways", "rotary", "convolution",
)  # fmt: skip
SUMS = ("weight norm", "spectral norm", "merged", "fake", "two ways", "convolution")


def model(kind: str) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(layer(kind), nn.Tanh(), layer(kind), nn.ReLU(), nn.Linear(WIDTH, 3))


def batch(number: int, rank: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(BATCH, WIDTH, generator=source), torch.randint(
        0, 3, (BATCH,), generator=source
    )


class Trained:
    """One run: its model, and the loss of each call."""

    def __init__(self, kind: str, *, clip: float | None = None, lr: float = 0.1) -> None:
        self.model = model(kind)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.7)
        self.losses: list[float] = []
        self._clip = clip

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = F.cross_entropy(self.model(x), y)
        return loss

    def values(self) -> list[Tensor]:
        return [t.detach().clone() for t in self.model.state_dict().values()]


class Eager(Trained):
    """k backwards, then an update of the mean."""

    def run(self, k: int, calls: int, wrote: Wrote | None = None, at: int = -1) -> Eager:
        for call in range(calls):
            if wrote is not None and call == at:
                wrote(self.model, self.optimizer)
            loss = self.loss(*batch(call))
            (loss / k).backward()
            self.losses.append(loss.item())
            if (call + 1) % k == 0:
                if self._clip is not None:
                    nn.utils.clip_grad_norm_(self.model.parameters(), self._clip)
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.scheduler.step()
        return self


class Optimized(Trained):
    """The same by an optimized step, made with everything held."""

    def __init__(self, kind: str, k: int, *, clip: float | None = None, **options: Any) -> None:
        super().__init__(kind, clip=clip)
        options.setdefault("backend", "aot_eager")

        def train_step(x: Tensor, y: Tensor) -> Tensor:
            loss = self.loss(x, y)
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            return loss

        self.step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=k, **options)

    def run(
        self, calls: int, wrote: Wrote | None = None, at: int = -1, first: int = 0
    ) -> Optimized:
        with all_of_it():
            for call in range(first, first + calls):
                if wrote is not None and call == at:
                    wrote(self.model, self.optimizer)
                self.losses.append(self.step(*batch(call)).item())
                if self.step.sync_gradients:
                    self.scheduler.step()
        return self


def on_ranks(rank: int, kind: str, k: int, calls: int, options: dict[str, Any]) -> dict[str, Any]:
    """Under DDP beside eager DDP; the last rank ends one call early. options: of `optimize`, and `clip`."""
    clip = options.pop("clip", None)
    mine = calls - (rank == dist.get_world_size() - 1)
    plain = Eager(kind)
    reference = DistributedDataParallel(copy.deepcopy(plain.model))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
    world = dist.get_world_size()
    weights = [1.0 + ((call + r) % 3) for r in range(world) for call in range(calls)]
    weighted = options.get("reduction") == "weighted"
    weight_of = {
        (r, call): weights[r * calls + call] for r in range(world) for call in range(calls)
    }
    runs = {r: calls - (r == world - 1) for r in range(world)}
    for start in range(0, calls, k):
        window = range(start, min(start + k, calls))
        total = sum(
            weight_of[r, call] if weighted else 1.0
            for r in runs
            for call in window
            if call < runs[r]
        )
        with reference.no_sync():
            for call in (c for c in window if c < mine):
                loss = F.cross_entropy(reference.module(batch(call, rank)[0]), batch(call, rank)[1])
                (loss * (weight_of[rank, call] if weighted else 1.0) / total).backward()
        for p in reference.module.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            dist.all_reduce(p.grad)
        if clip is not None:
            nn.utils.clip_grad_norm_(reference.module.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
    trained = Trained(kind)
    wrapped = DistributedDataParallel(trained.model)

    def train_step(m: nn.Module, o: Optimizer, x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        loss = F.cross_entropy(m(x), y)
        if weighted:
            gradsync_fx.micro_batch_weight(weight)
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(m.parameters(), clip)
        o.step()
        o.zero_grad()
        return loss

    step = gradsync_fx.optimize(train_step, gradient_accumulation_steps=k, **options)
    with all_of_it():
        for call in range(mine):
            weight = torch.tensor(weight_of[rank, call])
            step(wrapped, trained.optimizer, *batch(call, rank), weight)
        step.flush()
    pairs = zip(trained.model.parameters(), reference.module.parameters(), strict=True)
    return {
        "values": trained.values(),
        "off": max(float((a - b).detach().abs().max()) for a, b in pairs),
        "programs": list(step.programs),
    }


def saved(kind: str, k: int, calls: int, more: int) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters of a run that is saved inside a window, and of one that goes on from there in its place."""
    one = Optimized(kind, k).run(calls)
    file = io.BytesIO()
    torch.save(
        [
            one.step.state_dict(),
            one.model.state_dict(),
            one.optimizer.state_dict(),
            one.scheduler.state_dict(),
        ],
        file,
    )
    file.seek(0)
    window, of_model, of_optimizer, of_scheduler = torch.load(file)
    other = Optimized(kind, k)
    other.model.load_state_dict(of_model)
    other.optimizer.load_state_dict(of_optimizer)
    other.scheduler.load_state_dict(of_scheduler)
    other.step.load_state_dict(window)
    return one.run(more, first=calls).values(), other.run(more, first=calls).values()
