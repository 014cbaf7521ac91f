"""Whose parameters are whose: models of which a part is in DDP, ignored ones, loose tensors, inputs with gradients."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gradsync_fx
from tests.drive import plain_step, untraceable_step
from tests.optimizers import sgd
from tests.scenarios.common import data_of


class Parts(nn.Module):
    """A body and a head, with statistics; which of them are in DDP is the scenario's."""

    def __init__(self) -> None:
        super().__init__()
        self.body: nn.Module = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
        self.head: nn.Module = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.body(x)))
        return out


def _wrapped(model: Parts, how: str) -> nn.Module:
    if how == "body":
        model.body = DistributedDataParallel(model.body)
    elif how == "both":
        model.body = DistributedDataParallel(model.body)
        model.head = DistributedDataParallel(model.head, broadcast_buffers=False)
    elif how == "ignored":
        names = ["body.0.weight", "head.0.running_mean", "head.0.weight"]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return DistributedDataParallel(model)
    return model


def parts(
    rank: int, how: str, k: int, eagerly: bool = False, backend: str = "aot_eager"
) -> dict[str, Any]:
    """Two windows, then another step of the same model (as after a restart), which compares it anew."""
    torch.manual_seed(0)
    model = Parts()
    other = copy.deepcopy(model)
    ours, theirs = _wrapped(model, how), _wrapped(other, how)
    mine, eager = sgd(ours), sgd(theirs)
    options: dict[str, Any] = {"on_unsupported": "eager"} if eagerly else {"backend": backend}
    data = data_of(rank, 4, k)
    for half in (data[:2], data[2:]):
        run = gradsync_fx.optimize(
            untraceable_step if eagerly else plain_step, gradient_accumulation_steps=k, **options
        )
        for window in half:
            for batch in window:
                run(ours, mine, *batch)
        warned = run.report().warnings
    for window in data:
        for i, (x, y) in enumerate(window):
            with ExitStack() as stack:
                for m in theirs.modules():
                    if isinstance(m, DistributedDataParallel) and i + 1 < k:
                        stack.enter_context(m.no_sync())
                (nn.functional.mse_loss(theirs(x), y) / k).backward()
        eager.step()
        eager.zero_grad()
    names = {n.replace("module.", "") for n, _ in other.named_parameters()}
    return {
        "ours": {n.replace("module.", ""): t.clone() for n, t in ours.state_dict().items()},
        "eager": {n.replace("module.", ""): t.clone() for n, t in theirs.state_dict().items()},
        "parameters": names,
        "warnings": [w for w in warned if "without gradient synchronisation" in w],
    }


def loose(rank: int, wrap: str, how: str, eagerly: bool, backend: str) -> dict[str, Any]:
    """`functional_call` with tensors that no module holds, or a loose factor beside a model."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 1)
    model: nn.Module = DistributedDataParallel(inner) if wrap == "ddp" else inner
    prefix = "module." if wrap == "ddp" else ""
    start = [torch.ones(1, 8), torch.zeros(1), torch.ones(())]
    said = {}
    for who in ("eager", "ours"):
        w, b, factor = (t.clone().requires_grad_(True) for t in start)
        held = [w, b, factor] if how == "functional_call" else [factor, *inner.parameters()]
        before = [p.detach().clone() for p in inner.parameters()]
        optimizer = torch.optim.SGD(held, lr=0.1)

        options: dict[str, Any] = {"on_unsupported": "eager"} if eagerly else {"backend": backend}
        step = _loose_step(w, b, factor, prefix if how == "functional_call" else None, eagerly)
        run = gradsync_fx.optimize(step, **options) if who == "ours" else step
        for batch in data_of(rank, 3, 1):
            run(model, optimizer, *batch[0])
        said[who] = [p.detach().clone() for p in held]
        with torch.no_grad():
            for p, old in zip(inner.parameters(), before, strict=True):
                p.copy_(old)
    return said


def _loose_step(w: Tensor, b: Tensor, factor: Tensor, prefix: str | None, eagerly: bool) -> Any:
    def step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        if prefix is not None:
            given = {f"{prefix}weight": w, f"{prefix}bias": b}
            out = torch.func.functional_call(model, given, (x,))
        else:
            out = model(x)
        loss = (out * factor - y).pow(2).mean()
        if not eagerly or loss.item() > -1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def inputs(rank: int, how: str, k: int, wrap: str, options: dict[str, Any]) -> dict[str, Any]:
    """Inputs that require a gradient: new ones, one and the same, in a dictionary, alike on the ranks."""
    torch.manual_seed(0)
    inner = nn.Linear(8, 1)
    other = copy.deepcopy(inner)
    model = DistributedDataParallel(inner) if wrap == "ddp" else inner
    twin = DistributedDataParallel(other) if wrap == "ddp" else other

    def step(model: nn.Module, optimizer: Any, batch: dict[str, Tensor]) -> Tensor:
        loss = nn.functional.mse_loss(model(batch["x"]), batch["y"])
        if options.get("on_unsupported") is None or loss.item() > -1:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def batches() -> list[dict[str, Tensor]]:
        windows = data_of(0 if how == "alike" else rank, 2, k)
        found = [{"x": x.clone().requires_grad_(), "y": y} for w in windows for x, y in w]
        return [found[0]] * len(found) if how == "same" else found

    run = gradsync_fx.optimize(step, gradient_accumulation_steps=k, **options)
    ours, theirs = batches(), batches()
    mine, eager = sgd(model), sgd(twin)
    for batch in ours:
        run(model, mine, batch)
    for i, batch in enumerate(theirs):
        last = (i + 1) % k == 0
        with ExitStack() as stack:
            if wrap == "ddp" and not last:
                stack.enter_context(twin.no_sync())
            # The step's own loss is not divided: the input's gradient is that of its call.
            before = batch["x"].grad
            batch["x"].grad = None
            (nn.functional.mse_loss(twin(batch["x"]), batch["y"]) / k).backward()
            found = batch["x"].grad * k
            batch["x"].grad = found if before is None else before + found
        if last:
            if wrap != "ddp":
                for p in other.parameters():
                    torch.distributed.all_reduce(p.grad)
                    p.grad /= 2
            eager.step()
            eager.zero_grad()
    return {
        "ours": [p.detach() for p in inner.parameters()],
        "eager": [p.detach() for p in other.parameters()],
        "inputs": [b["x"].grad for b in ours],
        "theirs": [b["x"].grad for b in theirs],
        "sums": sorted(run.gradients()),
    }
