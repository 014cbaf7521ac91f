"""One combination of options on several ranks, beside one eager process that has the micro-batches of all of them.

A run is a list of slots, in each of which every rank has a micro-batch or none, and of what is done between them. The
reference takes each slot's gradients at the parameters as they are then, sums them for each optimizer by itself, and
updates with plain PyTorch.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.options import OPTIMIZATIONS
from tests.scenarios.blocks import deep, every_layer
from tests.scenarios.once import all_of_it


Row = dict[str, Any]
ROWS = 6  # of a micro-batch
EXPECTED = (
    "lr_scheduler.step",  # the other optimizer's scheduler, before its own first window's end
    "bf16 and fp16 are mixed",  # Inductor, of Muon's products beside a float16 wire
    "without a single term",  # a last window that holds nothing finite makes no update
)
DTYPES = {"float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Slot:
    """A micro-batch for each rank, by its seed; None for a rank without data. bad: ranks whose data has a NaN."""

    seeds: tuple[int | None, ...]
    bad: tuple[int, ...] = ()

    def batch(self, rank: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Inputs, classes, and how many tokens of each row count."""
        seed = self.seeds[rank]
        if seed is None:
            return None
        source = torch.Generator().manual_seed(seed)
        x, y = torch.randn(ROWS, 8, generator=source), torch.randint(4, (ROWS,), generator=source)
        kept = torch.randint(2, ROWS + 1, (), generator=source)
        if rank in self.bad:
            x[0, 0] = math.nan
        return x, y, (torch.arange(ROWS) < kept).float()


Event = Slot | str  # or "discard", "stop" (saved, and resumed by new objects), "flush"


def run_of(row: Row, world: int) -> list[Event]:
    """What happens: two whole windows at least, and the row's own ending."""
    k, ending = row["k"], row["ending"]
    seeds = iter(range(100, 1000))
    bad = row["skip_nonfinite"]

    def slots(count: int, without: tuple[int, ...] = ()) -> list[Event]:
        return [
            Slot(
                tuple(None if r in without else next(seeds) for r in range(world)),
                (0,) if bad and i == count - 1 else (),
            )
            for i in range(count)
        ]

    first = slots(k)
    if ending == "flush":
        return [*first, *slots(k), *slots(max(k - 1, 1)), "flush"]
    if ending == "skip":
        return [*first, *slots(1, without=(world - 1,)), *slots(k - 1), *slots(k)]
    if ending == "uneven":
        return [*first, *slots(k, without=(world - 1,)), *slots(1, without=(world - 1,)), "flush"]
    if ending == "discard":
        return [*first, *(slots(k - 1) if k > 1 else []), "discard", *slots(k), *slots(k)]
    if ending == "resume":
        return [*first, *slots(1), "stop", *slots(k - 1), *slots(k)]
    return [*first, *slots(k), *slots(k)]


def small() -> nn.Module:
    """Parameters of one element and of none that fills a cache line among them."""
    return nn.Sequential(nn.Linear(8, 5), nn.LayerNorm(5), Scaled(), nn.Linear(5, 4))


def large() -> nn.Module:
    """Products large enough to be added where the sums lie, and sums large enough to be shared in memory."""
    return nn.Sequential(
        nn.Linear(8, 512), nn.ReLU(), nn.Linear(512, 600, bias=False), nn.LayerNorm(600),
        nn.Linear(600, 4),
    )  # fmt: skip


def normed() -> nn.Module:
    """Weights that are computed once per window: all is held that can be."""
    last = weight_norm(nn.Linear(24, 4))
    return nn.Sequential(weight_norm(nn.Linear(8, 24)), nn.Tanh(), Scaled(), last)


class Scaled(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.25))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


MODELS: dict[str, Callable[[], nn.Module]] = {
    "small": small,
    "large": large,
    "normed": normed,  # weights that are computed once per window
    "deep": deep,  # layers that are compiled once
}
FORCED = {"normed": all_of_it, "deep": every_layer}


def optimizers_of(row: Row, model: nn.Module) -> list[Optimizer]:
    """One optimizer, or two that share the parameters among them."""
    which, params = row["optimizer"], list(model.parameters())
    # An epsilon that keeps the update smooth: rounding on the wire must not become the sign of a gradient.
    adam: dict[str, Any] = {"lr": 0.02, "eps": 1e-2, "weight_decay": 0.1}
    if which == "sgd":
        return [torch.optim.SGD(params, lr=0.2)]
    if which == "adamw":
        return [torch.optim.AdamW(params, **adam)]
    if which == "momentum":
        return [torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01)]
    if which == "adamw fused":
        return [torch.optim.AdamW(params, **adam, fused=True)]
    if which == "muon":
        matrices = [p for p in params if p.dim() == 2]
        others = [p for p in params if p.dim() != 2]
        return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, **adam)]
    if which == "two windows":
        return [
            torch.optim.AdamW(params[:-2], **adam),
            torch.optim.SGD(params[-2:], lr=0.1, momentum=0.9),
        ]
    raise ValueError(which)


def lengths_of(row: Row) -> list[int]:
    """k of each optimizer."""
    if row["optimizer"] == "two windows":
        return [row["k"], 1]
    return [row["k"]] * (2 if row["optimizer"] == "muon" else 1)


def loss_of(row: Row, model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
    """The mean over what counts."""
    losses = cross_entropy(model(x), y, reduction="none")
    return (losses * mask).sum() / mask.sum() if row["reduction"] == "weighted" else losses.mean()


def clip(row: Row, optimizers: list[Optimizer]) -> None:
    """Where each optimizer has its own window, each has its own norm."""
    held = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    if row["optimizer"] != "two windows":
        held = [[p for some in held for p in some]]
    for params in held:
        if row["clip"] == "norm":
            nn.utils.clip_grad_norm_(params, 0.5)
        elif row["clip"] == "value":
            nn.utils.clip_grad_value_(params, 0.05)


def step_of(row: Row, optimizers: list[Optimizer]) -> Callable[..., Tensor]:
    def train_step(model: nn.Module, x: Tensor, y: Tensor, mask: Tensor) -> Tensor:
        if row["reduction"] == "weighted":
            gradsync_fx.micro_batch_weight(mask.sum())
        loss = loss_of(row, model, x, y, mask)
        loss.backward()
        clip(row, optimizers)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return loss

    return train_step


@dataclass
class Vote:
    """What `commit` answers where a row has one: the last rank refuses the second update."""

    refuses: bool
    asked: int = 0

    def __call__(self) -> bool:
        self.asked += 1
        return not (self.refuses and self.asked == 2)


@dataclass
class Trained:
    """A model with what trains it, as users hold them."""

    row: Row
    model: nn.Module
    vote: Vote
    told: list[gradsync_fx.UpdateRecord] = field(default_factory=list)
    optimizers: list[Optimizer] = field(init=False)
    schedules: list[Any] = field(init=False)
    step: Any = field(init=False)
    wrapped: nn.Module = field(init=False)

    def __post_init__(self) -> None:
        row = self.row
        self.optimizers = optimizers_of(row, self.model)
        self.schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in self.optimizers]
        plain = row["wrap"] == "plain"
        self.wrapped = self.model if plain else DistributedDataParallel(self.model)
        two = row["optimizer"] == "two windows"
        k: Any = dict(zip(self.optimizers, lengths_of(row), strict=True)) if two else row["k"]
        self.step = gradsync_fx.optimize(
            step_of(row, self.optimizers),
            gradient_accumulation_steps=k,
            commit=self.vote if row["commit"] else None,
            on_update=self.told.append if row["on_update"] and dist.get_rank() else None,
            **options_of(row),
        )

    def state(self) -> Any:
        held = [self.model, *self.optimizers, *self.schedules, self.step]
        return copy.deepcopy([one.state_dict() for one in held])

    def resumed(self) -> Trained:
        """New objects with this one's state."""
        fresh = Trained(self.row, MODELS[self.row["model"]](), self.vote, self.told)
        held = [fresh.model, *fresh.optimizers, *fresh.schedules, fresh.step]
        for one, saved in zip(held, self.state(), strict=True):
            one.load_state_dict(saved)
        return fresh


def options_of(row: Row) -> dict[str, Any]:
    """The keyword arguments of `optimize` that a row says."""
    return {
        "reduction": row["reduction"],
        "skip_nonfinite": row["skip_nonfinite"],
        "sync_each_batch": row["sync_each_batch"],
        "bucket_cap_mb": row["bucket_cap_mb"],
        "accumulator_dtype": DTYPES.get(row["accumulator_dtype"]),
        "reduce_dtype": DTYPES.get(row["reduce_dtype"]),
        "shard_optimizer": row["divided"] in ("updates", "hidden"),
        "overlap_param_gather": row["divided"] == "hidden",
        "device_mesh": mesh_of(row),
        "without": tuple(name for name in OPTIMIZATIONS if row[f"without {name}"]),
        "backend": row.get("backend", "inductor"),
    }


def mesh_of(row: Row) -> DeviceMesh | None:
    """All ranks inside of one machine, or each a machine."""
    world = dist.get_world_size()
    shapes = {"inside": (1, world), "between": (world, 1)}
    return init_device_mesh("cpu", shapes[row["divided"]]) if row["divided"] in shapes else None


def ours(row: Row, rank: int, events: list[Event], model: nn.Module) -> list[list[Tensor]]:
    """The parameters after each slot, flush or discard, as gradsync_fx trains them."""
    trained, states = Trained(row, model, Vote(rank == dist.get_world_size() - 1)), []
    for number, event in enumerate(events):
        if event == "stop":
            trained = trained.resumed()
            continue
        step = trained.step
        updates = step.optimizer_step
        if event == "flush":
            step.flush(on_update=lambda t=trained: advance(t.schedules))
        elif event == "discard":
            step.discard()
        else:
            assert isinstance(event, Slot)
            batch = event.batch(rank)
            if batch is not None:
                step(trained.wrapped, *batch)
            elif all(isinstance(e, str) or e.batch(rank) is None for e in events[number:]):
                continue  # its data has ended: flush does the rest
            else:
                step.skip()
            if step.optimizer_step > updates:
                advance(trained.schedules)
        step.settle()  # each rank by itself, and only where something is on its way
        states.append([p.detach().clone() for p in trained.model.parameters()])
    check_told(trained)
    return states


def check_told(trained: Trained) -> None:
    """Each update in one record, with what it is made of."""
    if trained.row["on_update"] and dist.get_rank():
        updates = trained.step.optimizer_step
        assert [record.update for record in trained.told] == list(range(1, updates + 1))
        for record in trained.told:
            assert record.terms > 0
            assert record.loss is not None
            assert math.isfinite(record.loss)
            assert bool(record.gradient_norms) == (trained.row["clip"] == "norm")


def advance(schedules: list[Any]) -> None:
    for schedule in schedules:
        schedule.step()


def truth(row: Row, world: int, events: list[Event], model: nn.Module) -> list[list[Tensor]]:
    """The same in plain PyTorch, in one process, with every rank's micro-batches."""
    optimizers = optimizers_of(row, model)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in optimizers]
    held = [[p for g in o.param_groups for p in g["params"]] for o in optimizers]
    lengths = lengths_of(row)
    sums = [[torch.zeros_like(p) for p in params] for params in held]
    weights, slots = [0.0] * len(held), [0] * len(held)
    states, vote = [], Vote(bool(row["commit"]))

    def close(parts: list[int]) -> None:
        done = [part for part in parts if weights[part]]
        if done and not vote():
            done = []
        for part in done:
            divisor = float(world) if row["reduction"] == "sum" else weights[part]
            for p, total in zip(held[part], sums[part], strict=True):
                p.grad = total / divisor
        if done:
            clip(row, [optimizers[part] for part in done])
        for part in done:
            optimizers[part].step()
        for part in parts:
            weights[part], slots[part] = 0.0, 0
            for p, total in zip(held[part], sums[part], strict=True):
                p.grad = None
                total.zero_()
        if done:
            advance(schedules)

    for event in events:
        if event == "stop":
            continue
        if event == "flush":
            close([part for part in range(len(held)) if slots[part]])
        elif event == "discard":
            for part, totals in enumerate(sums):
                weights[part], slots[part] = 0.0, 0
                for total in totals:
                    total.zero_()
        else:
            assert isinstance(event, Slot)
            for rank in range(world):
                batch = event.batch(rank)
                if batch is None or rank in event.bad:
                    continue
                weight = batch[2].sum().item() if row["reduction"] == "weighted" else 1.0
                loss_of(row, model, *batch).backward()
                for part, params in enumerate(held):
                    weights[part] += weight
                    for p, total in zip(params, sums[part], strict=True):
                        total += weight * p.grad
                        p.grad = None
            slots = [n + 1 for n in slots]
            close([part for part, n in enumerate(slots) if n == lengths[part]])
        states.append([p.detach().clone() for p in model.parameters()])
    return states


def combination(rank: int, row: Row) -> dict[str, Any]:
    """How far the row's parameters are from eager's after each slot, and whether all ranks' are the same bits."""
    world = dist.get_world_size()
    torch.manual_seed(0)
    model = MODELS[row["model"]]()
    events = run_of(row, world)
    start = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    with warnings.catch_warnings():
        for known in EXPECTED:
            warnings.filterwarnings("ignore", f".*{known}")
        wanted = truth(row, world, events, copy.deepcopy(model))
        with FORCED.get(row["model"], nullcontext)():
            got = ours(row, rank, events, model)
    # A rank whose data has ended sees nothing between that and its flush.
    wanted = [*wanted[: len(got) - 1], wanted[-1]]
    off = []
    for mine, theirs in zip(got, wanted, strict=True):
        worst = max((a - b).abs().max().item() for a, b in zip(mine, theirs, strict=True))
        off.append(worst if all(p.isfinite().all() for p in mine) else math.inf)
    flat = torch.cat([p.reshape(-1) for p in got[-1]])
    others = [torch.empty_like(flat) for _ in range(world)]
    dist.all_gather(others, flat)
    moved = (flat - start).abs().max().item()
    return {"off": off, "alike": all(torch.equal(flat, o) for o in others), "moved": moved}
