"""Windows whose updates are shared out among the ranks, beside the same windows where every rank makes all of them."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import gradsync_fx
from tests.drive import plain_step, quick
from tests.scenarios.disagreement import refusal as refused_call


History = list[list[Tensor]]
Make = Callable[..., gradsync_fx.OptimizedStep]


class Lion(Optimizer):
    """From outside of torch; element by element."""

    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decay": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"] = torch.zeros_like(p)
                one, two = group["betas"]
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(torch.sign(state["m"] * one + p.grad * (1 - one)), alpha=-group["lr"])
                state["m"].mul_(two).add_(p.grad, alpha=1 - two)


class Lamb(Optimizer):
    """With a trust ratio: it looks at whole tensors."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
                state["v"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                u = state["m"] / (state["v"].sqrt() + 1e-6) + 0.01 * p
                p.sub_(u * (p.norm() / (u.norm() + 1e-12)) * group["lr"])


class Together(Optimizer):
    """A norm over all of its parameters, in the update: no rank can make a part of it."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        total = sum((p.grad * p.grad).sum() for p in held)
        for p in held:
            p.sub_(p.grad / (total.sqrt() + 1.0), alpha=0.01)


class Looking(Optimizer):
    """A clock in the update: a trace does not see it."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        rate = 0.1 if time.time() > 0 else 0.2
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=rate)


o = torch.optim
BY_ELEMENT: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda p: o.AdamW(p, lr=1e-2),
    "amsgrad": lambda p: o.Adam(p, lr=1e-2, amsgrad=True),
    "momentum": lambda p: o.SGD(p, lr=0.1, momentum=0.9),
    "nesterov": lambda p: o.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "RMSprop": lambda p: o.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "Adagrad": lambda p: o.Adagrad(p, lr=1e-2),
    "Adadelta": lambda p: o.Adadelta(p),
    "NAdam": lambda p: o.NAdam(p, lr=1e-2),
    "Lion": Lion,
}
BY_TENSOR: dict[str, Callable[[Any], Optimizer]] = {
    "Muon": lambda p: o.Muon(p, lr=1e-2),
    "Adafactor": lambda p: o.Adafactor(p, lr=1e-2),
    "Rprop": lambda p: o.Rprop(p, lr=1e-2),
    "Lamb": Lamb,
}
OTHERS: dict[str, Callable[[Any], Optimizer]] = {"Together": Together, "Looking": Looking}


def made(name: str, model: nn.Module) -> Optimizer:
    return (BY_ELEMENT | BY_TENSOR | OTHERS)[name](model.parameters())


def net(bias: bool = True) -> nn.Module:
    """Parameters that are split among ranks, and those that are too small for it."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, 64, bias=bias), nn.Tanh(), nn.Linear(64, 33, bias=bias), nn.Tanh(), nn.Linear(33, 4, bias=bias),
    )  # fmt: skip


def batches(count: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """By micro-step, over all ranks."""
    source = torch.Generator().manual_seed(seed)
    return (
        torch.randn(count, 8, 16, generator=source),
        torch.randn(count, 8, 4, generator=source),
    )


def held(*models: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for model in models for p in model.parameters()]


def clipped(order: float, limit: float = 0.05) -> Callable[..., Any]:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type=order)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return step


def bytes_of(optimizer: Optimizer) -> int:
    """Of the tensors of a parameter's kind that this rank holds."""
    values = (v for state in optimizer.state.values() for v in state.values())
    tensors = [v for v in values if isinstance(v, Tensor) and v.dim() and v.device.type != "meta"]
    return sum(t.numel() * t.element_size() for t in tensors)


def trained(
    rank: int, name: str, order: float | None, shard: bool, backend: str = "aot_eager"
) -> dict[str, Any]:
    """Four windows of two micro-steps: parameters after each, norms, bytes of state."""
    world, k = dist.get_world_size(), 2
    model = net(bias=name != "Muon")
    optimizer = made(name, model)
    function = plain_step if order is None else clipped(order)
    step = quick(function, k, backend=backend, shard_optimizer=shard)
    x, y = batches(4 * world * k)
    history, norms = [], []
    for window in range(4):
        for i in range(k):
            at = window * world * k + rank * k + i
            found = step(model, optimizer, x[at], y[at])
        history.append(held(model))
        norms.append(found[1].item() if order is not None else 0.0)
    return {"history": history, "norms": norms, "bytes": bytes_of(optimizer)}


def joined(name: str, order: float | None, world: int) -> dict[str, Any]:
    """The same in plain PyTorch, one process with all of the data."""
    model = net(bias=name != "Muon")
    optimizer = made(name, model)
    function = plain_step if order is None else clipped(order)
    x, y = batches(4 * world * 2)
    history, norms = [], []
    for window in range(4):
        some = slice(window * world * 2, (window + 1) * world * 2)
        found = function(model, optimizer, x[some].reshape(-1, 16), y[some].reshape(-1, 4))
        history.append(held(model))
        norms.append(found[1].item() if order is not None else 0.0)
    return {"history": history, "norms": norms, "bytes": bytes_of(optimizer)}


# Windows of all kinds: `script(rank, make)` gives parameters after updates; make(function, k, **options) -> step.


def weighted(rank: int, make: Make) -> History:
    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor, w: float) -> Tensor:
        gradsync_fx.micro_batch_weight(w)
        return plain_step(model, optimizer, x, y)

    model = net()
    optimizer, run = made("AdamW", model), make(step, 2, reduction="weighted")
    x, y = batches(12)
    found = []
    for i in range(6):
        run(model, optimizer, x[2 * i + rank], y[2 * i + rank], float(1 + i + 3 * rank))
        found.append(held(model))
    return found


def not_finite(rank: int, make: Make) -> History:
    model = net()
    optimizer, run = made("AdamW", model), make(plain_step, 2, skip_nonfinite=True)
    x, y = batches(12)
    x[5] = torch.inf
    found = []
    for i in range(6):
        run(model, optimizer, x[2 * i + rank], y[2 * i + rank])
        found.append(held(model))
    return found


def uneven(rank: int, make: Make) -> History:
    return until_flushed(rank, make(clipped(2.0), 2), (5, 3)[rank])


def until_flushed(rank: int, run: Any, count: int) -> History:
    """After each update of a rank that makes so many calls, and then flushes."""
    model = net()
    optimizer = made("AdamW", model)
    x, y = batches(12)
    found = []
    for i in range(count):
        run(model, optimizer, x[2 * i + rank], y[2 * i + rank])
        found += [held(model)] if run.sync_gradients else []
    run.flush(on_update=lambda: found.append(held(model)))
    return [*found, held(model)]


def skipping(rank: int, make: Make) -> History:
    model = net()
    optimizer, run = made("AdamW", model), make(plain_step, 2)
    x, y = batches(12)
    run.prepare(model, optimizer, x[0], y[0])
    found = []
    for i in range(6):
        if (i + rank) % 3 == 0:
            run.skip()
        else:
            run(model, optimizer, x[2 * i + rank], y[2 * i + rank])
        found.append(held(model))
    return found


def branches(rank: int, make: Make) -> History:
    """Ranks take other heads of a model; the state of each stays where it is."""
    torch.manual_seed(0)
    body = nn.Linear(16, 40)
    heads = nn.ModuleList([nn.Linear(40, 4), nn.Linear(40, 4)])
    whole = nn.ModuleList([body, heads])
    optimizer = made("AdamW", whole)

    def step(which: int, x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(heads[which](torch.tanh(body(x))), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = make(step, 2)
    x, y = batches(20)
    order = ((0, 0, 0, 0, 1, 1, 0, 1), (0, 0, 1, 1, 1, 1, 1, 0))[rank]
    found = []
    for i, which in enumerate(order):
        run(which, x[2 * i + rank], y[2 * i + rank])
        found.append(held(whole))
    return found


def several(rank: int, make: Make) -> History:
    """A k for each optimizer."""
    one, two = net(), net()
    first, second = made("AdamW", one), made("Lamb", two)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(one(x), y) + F.mse_loss(two(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(two.parameters(), 0.1)
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
        return loss

    run = make(step, {first: 1, second: 3})
    x, y = batches(12)
    found = []
    for i in range(6):
        run(x[2 * i + rank], y[2 * i + rank])
        found.append(held(one, two))
    return found


def adversarial(rank: int, make: Make) -> History:
    """The second update's gradients depend on the first update."""
    one, two = nn.Linear(16, 32), nn.Linear(32, 4)
    for model in (one, two):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.linspace(-0.3, 0.3, p.numel()).view(p.shape))
    first, second = made("AdamW", two), made("AdamW", one)

    def step(x: Tensor, y: Tensor) -> Tensor:
        F.mse_loss(two(one(x).detach()), y).backward()
        nn.utils.clip_grad_norm_(two.parameters(), 0.1)
        first.step()
        first.zero_grad()
        loss = F.mse_loss(two(one(x)), -y)
        loss.backward()
        nn.utils.clip_grad_norm_(one.parameters(), 0.1)
        second.step()
        second.zero_grad()
        first.zero_grad()
        return loss

    run = make(step, 1)
    x, y = batches(8)
    found = []
    for i in range(4):
        run(x[2 * i + rank], y[2 * i + rank])
        found.append(held(one, two))
    return found


def another_group(rank: int, make: Make) -> History:
    """Parameters that come later, a schedule, and some that rest for a window."""
    model, more = net(), nn.Linear(4, 4)
    with torch.no_grad():
        more.weight.copy_(torch.eye(4))
        more.bias.zero_()
    optimizer = made("AdamW", model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)

    def step(both: bool, x: Tensor, y: Tensor) -> Tensor:
        out = model(x)
        loss = F.mse_loss(more(out) if both else out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = make(step, 2)
    x, y = batches(24)
    found = []
    for i in range(12):
        if i == 4:
            optimizer.add_param_group({"params": list(more.parameters())})
        next(model.parameters()).requires_grad_(not 6 <= i < 8)
        run(i >= 4, x[2 * i + rank], y[2 * i + rank])
        if run.sync_gradients:
            scheduler.step()
        found.append(held(model, more))
    return found


def odd_parameters(rank: int, make: Make) -> History:
    """Scalars, empty ones, channels last, two dtypes."""
    torch.manual_seed(0)
    model = nn.Module()
    model.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    model.scale = nn.Parameter(torch.tensor(0.5))
    model.nothing = nn.Parameter(torch.zeros(0, 3))
    model.wide = nn.Parameter(torch.randn(70, dtype=torch.float64))
    model.narrow = nn.Parameter(torch.randn(130).bfloat16())
    optimizer = made("AdamW", model)

    def step(x: Tensor) -> Tensor:
        out = model.conv(x).pow(2).mean() * model.scale + model.nothing.sum()
        loss: Tensor = out + model.wide.pow(2).mean() + model.narrow.float().pow(2).mean()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = make(step, 2)
    source = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(4):
        run(torch.randn(2, 3, 6, 6, generator=source).to(memory_format=torch.channels_last))
        found.append(held(model))
    return found


def readers(rank: int, make: Make) -> History:
    """Gradients read in ways of all kinds: decayed, by rows, whole, remembered, and averaged parameters."""
    model = net()
    memory = torch.zeros(64, 16)
    average = copy.deepcopy(model)
    optimizer = made("AdamW", model)

    def step(x: Tensor, y: Tensor) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.grad.add_(p, alpha=0.01)
                if p.dim() > 1:  # by rows
                    p.grad.div_(p.grad.norm(dim=1, keepdim=True) + 1.0)
            first = next(model.parameters()).grad
            assert first is not None
            memory.mul_(0.9).add_(first)
            largest = max(p.grad.abs().max() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 0.1)
        seen = first.clone(), largest
        optimizer.zero_grad()
        return loss, seen

    run = make(step, 2)
    x, y = batches(12)
    found = []
    for i in range(6):
        _, (grad, largest) = run(x[2 * i + rank], y[2 * i + rank])
        found.append([*held(model, average), memory.clone()])
        if run.sync_gradients:
            found[-1] += [grad.clone(), largest.clone()]
    return found


def complex_numbers(rank: int, make: Make) -> History:
    torch.manual_seed(0)
    w = nn.Parameter(torch.randn(40, dtype=torch.complex64))
    optimizer = torch.optim.SGD([w], lr=0.1, momentum=0.9)

    def step(x: Tensor) -> Tensor:
        loss: Tensor = (w * x).abs().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = make(step, 2)
    found = []
    for i in range(4):
        run(torch.full((40,), 1.0 + i + rank) + 1j)
        found.append([w.detach().clone()])
    return found


def each_call(rank: int, make: Make) -> History:
    return until_flushed(rank, make(clipped(2.0), 2, sync_each_batch=True), (6, 4)[rank])


def summed_by_hand(rank: int, make: Make) -> History:
    model = net()
    optimizer = made("AdamW", model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad.div_(2)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = make(step, 2)
    x, y = batches(8)
    found = []
    for i in range(4):
        run(x[2 * i + rank], y[2 * i + rank])
        found.append(held(model))
    return found


SCRIPTS: dict[str, Callable[[int, Make], History]] = {
    f.__name__: f
    for f in (
        weighted, not_finite, uneven, skipping, branches, several, adversarial, another_group, odd_parameters, readers,
        complex_numbers, each_call, summed_by_hand,
    )
}  # fmt: skip


def both_ways(rank: int, name: str, backend: str, options: dict[str, Any]) -> tuple[History, ...]:
    """A script with updates that are shared out, and as they are."""

    def run(shard: bool) -> History:
        def make(function: Any, k: Any, **more: Any) -> gradsync_fx.OptimizedStep:
            return quick(function, k, backend=backend, shard_optimizer=shard, **more, **options)

        return SCRIPTS[name](rank, make)

    return run(True), run(False)


def refusal(call: Callable[[], object]) -> str:
    found = refused_call(call)
    return f"{found['type']} {found['text']}"


def refused(rank: int, name: str, options: dict[str, Any]) -> tuple[str, list[bool]]:
    """The error of a first call, and whether parameters and state are as they were."""
    model = net()
    optimizer = made(name, model)
    before = held(model)
    step = quick(plain_step, 2, shard_optimizer=True, **options)
    x, y = batches(2)
    text = refusal(lambda: step(model, optimizer, x[rank], y[rank]))
    same = [torch.equal(a, b) for a, b in zip(before, held(model), strict=True)]
    return text, [*same, not optimizer.state]


def equal(a: Any, b: Any) -> bool:
    """To the bit, tensors with their forms."""
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, Tensor):
        return (a.shape, a.dtype, a.stride()) == (b.shape, b.dtype, b.stride()) and torch.equal(
            a, b
        )
    return bool(a == b)


def states(rank: int, name: str) -> dict[str, bool]:
    """State dicts of both ways, and each loaded into each."""
    x, y = batches(40)

    def windows(shard: bool, model: nn.Module, optimizer: Optimizer, first: int, last: int) -> None:
        step = quick(plain_step, 2, shard_optimizer=shard)
        for i in range(2 * first, 2 * last):
            step(model, optimizer, x[2 * i + rank], y[2 * i + rank])

    def begun(shard: bool) -> tuple[nn.Module, Optimizer]:
        model = net(bias=name != "Muon")
        optimizer = made(name, model)
        windows(shard, model, optimizer, 0, 3)
        return model, optimizer

    def resumed(shard: bool, model: nn.Module, state: Any) -> tuple[list[Tensor], Any]:
        fresh = copy.deepcopy(model)
        optimizer = made(name, fresh)
        optimizer.load_state_dict(copy.deepcopy(state))
        windows(shard, fresh, optimizer, 3, 6)
        return held(fresh), optimizer.state_dict()

    mine, theirs = begun(True), begun(False)
    ours, whole = mine[1].state_dict(), theirs[1].state_dict()
    found = {"state_dict": equal(ours, whole)}
    straight = resumed(False, theirs[0], whole)
    for what, model, state in (("shards", mine[0], ours), ("whole", theirs[0], whole)):
        found[f"{what} into shards"] = equal(resumed(True, model, state), straight)
        found[f"{what} into whole"] = equal(resumed(False, model, state), straight)
    mine[1].load_state_dict(copy.deepcopy(straight[1]))
    found["loaded where it is divided"] = equal(mine[1].state_dict(), straight[1])
    return found


def saved_by_some(rank: int, other: str) -> tuple[str, bool]:
    """The error where rank 0 alone asks for the state; and whether it came in time."""
    model = net()
    optimizer = made("AdamW", model)
    step = quick(plain_step, 1, shard_optimizer=True, rank_timeout=3.0)
    x, y = batches(2)
    step(model, optimizer, x[rank], y[rank])
    begun = time.monotonic()
    if rank == 0:
        text = refusal(optimizer.state_dict)
    elif other == "trains":
        text = refusal(lambda: step(model, optimizer, x[rank], y[rank]))
    else:
        time.sleep(6)
        text = ""
    return text, time.monotonic() - begun < 20


def stopped_inside(rank: int, folder: str, shard: bool) -> list[list[Tensor]]:
    """Seven micro-steps of windows of two, straight through; and stopped after five, saved, and resumed."""
    x, y = batches(14)

    def run(step: Any, model: nn.Module, optimizer: Optimizer, some: range) -> None:
        for i in some:
            step(model, optimizer, x[2 * i + rank], y[2 * i + rank])

    straight = net()
    optimizer, step = made("AdamW", straight), quick(clipped(2.0), 2, shard_optimizer=shard)
    run(step, straight, optimizer, range(7))
    step.flush()
    model = net()
    optimizer, step = made("AdamW", model), quick(clipped(2.0), 2, shard_optimizer=shard)
    run(step, model, optimizer, range(5))
    path = Path(folder) / f"rank{rank}-{shard}.pt"
    step.save(path, model=model.state_dict(), optimizer=optimizer.state_dict())
    again = net()
    optimizer, step = made("AdamW", again), quick(clipped(2.0), 2, shard_optimizer=shard)
    found = step.load(path)
    again.load_state_dict(found["model"])
    optimizer.load_state_dict(found["optimizer"])
    run(step, again, optimizer, range(5, 7))
    step.flush()
    return [held(straight), held(again)]


def checkpointed(rank: int, folder: str) -> bool:
    """A state dict through torch.distributed.checkpoint."""
    model = net()
    optimizer, step = made("AdamW", model), quick(plain_step, 1, shard_optimizer=True)
    x, y = batches(2)
    step(model, optimizer, x[rank], y[rank])
    before = optimizer.state_dict()
    dcp.save({"optimizer": before}, checkpoint_id=folder)
    wanted = copy.deepcopy(before)
    into = {"optimizer": copy.deepcopy(before)}
    for state in into["optimizer"]["state"].values():
        for value in state.values():
            value.zero_()
    dcp.load(into, checkpoint_id=folder)
    return equal(into["optimizer"]["state"], wanted["state"])


def saved_in_pieces(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Three windows, then the shards are saved; the whole state, and windows that follow."""
    model = net(bias=name != "Muon")
    optimizer, step = made(name, model), quick(plain_step, 1, shard_optimizer=True)
    x, y = batches(24)
    world = dist.get_world_size()
    for i in range(3):
        step(model, optimizer, x[world * i + rank], y[world * i + rank])
    shards = gradsync_fx.OptimizerShards(optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": shards}, checkpoint_id=folder)
    return {"state": optimizer.state_dict(), "parameters": held(model)}


def loaded_in_pieces(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Into a fresh optimizer, on as many ranks as there are; the optimizer's rate comes with it."""
    model = net(bias=name != "Muon")
    optimizer, step = made(name, model), quick(plain_step, 1, shard_optimizer=True)
    optimizer.param_groups[0]["lr"] = 123.0
    x, y = batches(24)
    step.prepare(model, optimizer, x[0], y[0])
    parts = {"model": model.state_dict(), "optimizer": gradsync_fx.OptimizerShards(optimizer)}
    dcp.load(parts, checkpoint_id=folder)
    model.load_state_dict(parts["model"])  # type: ignore[arg-type]
    return {"state": optimizer.state_dict(), "parameters": held(model)}


def loaded_whole(rank: int, name: str, folder: str) -> dict[str, Any]:
    """Into the state dict of an optimizer that is not divided."""
    model = net(bias=name != "Muon")
    optimizer = made(name, model)
    x, y = batches(24)
    plain_step(model, optimizer, x[0], y[0])
    parts = {"optimizer": optimizer.state_dict()}
    dcp.load(parts, checkpoint_id=folder)
    return {"state": parts["optimizer"]}


def checked(rank: int) -> tuple[bool, bool]:
    """`self_check` before the first update and between two, where state is divided."""
    model = net()
    optimizer, step = made("AdamW", model), quick(clipped(2.0), 2, shard_optimizer=True)
    x, y = batches(8)
    first = bool(step.self_check(model, optimizer, x[rank], y[rank]))
    for i in range(2):
        step(model, optimizer, x[2 * i + rank], y[2 * i + rank])
    return first, bool(step.self_check(model, optimizer, x[rank], y[rank]))


def collectives(rank: int) -> dict[str, list[str]]:
    """Those of each program of a clipped step, in their order."""
    model = net()
    optimizer = made("AdamW", model)
    step = quick(clipped(2.0), 2, shard_optimizer=True, bucket_cap_mb=0.005)
    x, y = batches(2)
    for _ in range(2):
        step(model, optimizer, x[rank], y[rank])
    step(model, optimizer, x[rank], y[rank])
    step.flush()
    return {
        name: [str(n.target).split(".")[1] for n in module.graph.nodes if "_c10d" in str(n.target)]
        for name, module in step.programs.items()
    }


def wires(rank: int, dtype: torch.dtype, shard: bool) -> list[Tensor]:
    """Parameters after four windows with a narrow wire; shard False and float32 are the reference."""
    model = net()
    optimizer = made("momentum", model)
    step = quick(plain_step, 2, shard_optimizer=shard, reduce_dtype=dtype)
    x, y = batches(32)
    world = dist.get_world_size()
    for i in range(8):
        step(model, optimizer, x[world * i + rank], y[world * i + rank])
    return held(model)


def reported(rank: int, name: str) -> dict[str, int]:
    """Bytes of state that the report tells of, and those that are there; counters are on every rank, and left out."""
    model = net()
    optimizer, step = made(name, model), quick(plain_step, 1, shard_optimizer=True)
    x, y = batches(2)
    step(model, optimizer, x[rank], y[rank])
    found = step.report().sharing
    assert found is not None
    counters = sum(
        value.numel() * value.itemsize
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, Tensor) and value.dim() == 0 and value.device.type == "cpu"
    )
    return {
        "told": found.state_bytes - counters,
        "held": bytes_of(optimizer),
        "whole": found.whole_state_bytes - counters,
    }
