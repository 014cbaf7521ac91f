"""What one of two ranks does whose process group is not the default one, or that does other things between calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim import Optimizer

import gradsync_fx
from tests.counting import counted
from tests.drive import plain_step, quick
from tests.models import mlp
from tests.reference import accumulation, mse, regression


def fresh() -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def parameters(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def joined(*seeds: int, windows: int = 1, k: int = 2) -> list[Tensor]:
    """What one process makes of these ranks' data."""
    model, optimizer = fresh()
    parts = [regression(windows, k, seed=seed) for seed in seeds]
    merged: Any = [
        [tuple(map(torch.cat, zip(*batches, strict=True))) for batches in zip(*same, strict=True)]
        for same in zip(*parts, strict=True)
    ]
    accumulation(model, optimizer, merged)
    return parameters(model)


def in_a_mesh(rank: int, shape: tuple[int, int]) -> dict[str, Any]:
    """The data-parallel dimension of a mesh: of both ranks, or of one each."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("tensor", "data"))
    model, optimizer = fresh()
    step = quick(plain_step, 2, process_group=mesh["data"].get_group())
    with counted() as count:
        for batch in regression(1, 2, seed=rank)[0]:
            step(model, optimizer, *batch)
    return {"parameters": parameters(model), "all_reduces": count.all_reduces}


def beside_another_group(rank: int) -> dict[str, Any]:
    """A metric goes over a group of its own, in every call."""
    metrics = dist.new_group([0, 1])
    model, optimizer = fresh()

    def whole(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        loss = plain_step(model, optimizer, x, y)
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=metrics)
        return mean / 2

    step = quick(whole, 2)
    means = [float(step(model, optimizer, *batch)) for batch in regression(1, 2, seed=rank)[0]]
    return {"parameters": parameters(model), "means": means}


def through_torch_compile(rank: int) -> dict[str, Any]:
    """The same windows by `optimize` and by torch.compile's backend, flushed at the end."""
    found: dict[str, Any] = {}
    for way in ("optimize", "backend"):
        model, optimizer = fresh()
        options: Any = {"gradient_accumulation_steps": 2, "backend": "aot_eager"}
        if way == "optimize":
            step = gradsync_fx.optimize(plain_step, **options)
        else:
            step = torch.compile(plain_step, backend="gradsync", options=options)
        reduced = []
        for batch in regression(1, 5, seed=rank)[0]:
            with counted() as count:
                step(model, optimizer, *batch)
            reduced.append(count.all_reduces)
        gradsync_fx.window(step).flush()
        found[way] = (parameters(model), reduced, gradsync_fx.window(step).compile_count)
    return found


def with_evaluation_between(rank: int) -> dict[str, Any]:
    """Evaluation in inference mode, in autocast and with another precision of products, inside a window."""
    model, optimizer = fresh()
    step = gradsync_fx.optimize(plain_step, gradient_accumulation_steps=2, backend="aot_eager")
    pending = []
    for batch in regression(2, 1, seed=rank):
        step(model, optimizer, *batch[0])
        sums = {name: g.clone() for name, g in step.gradients().items()}
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        model.eval()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            mse(model, *batch[0])
        model.train()
        torch.set_float32_matmul_precision(before)
        pending.append(step.pending)
        assert all(torch.equal(g, sums[name]) for name, g in step.gradients().items())
    return {"parameters": parameters(model), "pending": pending, "compiled": step.compile_count}
