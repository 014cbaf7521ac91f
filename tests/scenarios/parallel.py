"""Steps that are parallel in another way than by data."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradsync_fx
from tests.scenarios.disagreement import refusal


def _pipeline(stage: nn.Module, rank: int) -> Any:
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    one = PipelineStage(stage, rank, 2, torch.device("cpu"))
    return ScheduleGPipe(one, 2, loss_fn=nn.functional.mse_loss)


def _prepared(how: str, rank: int) -> tuple[Any, Any]:
    """A model (or a pipeline) and its optimizer."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    if how in ("fully_shard", "fully_shard of a part"):
        from torch.distributed.fsdp import fully_shard

        fully_shard(model[1] if how.endswith("part") else model)
    elif how == "FullyShardedDataParallel":
        from torch.distributed.fsdp import FullyShardedDataParallel

        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif how == "tensor parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,))
        model = parallelize_module(model, mesh, {"0": ColwiseParallel()})
    elif how == "pipeline":
        return _pipeline(model[rank], rank), torch.optim.SGD(model[rank].parameters(), lr=0.1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def refused(rank: int, how: str, options: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer = _prepared(how, rank)

    def train_step(model: Any, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
        if how == "pipeline":
            model.step(x) if rank == 0 else model.step(target=y)
            loss = torch.zeros(())
        else:
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = gradsync_fx.optimize(train_step, gradient_accumulation_steps=2, **options)
    found = refusal(lambda: run(model, optimizer, torch.ones(4, 4), torch.zeros(4, 4)))
    dist.barrier()
    return {**found, "calls": run.micro_step}
