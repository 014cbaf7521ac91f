"""Four ranks on a mesh of two machines with two ranks each: reductions in two levels, beside those in one."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.optim import Optimizer

import gradsync_fx
from gradsync_fx.errors import GradSyncError
from tests.scripts import play
from tests.truth import Rules, Script


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("machines", "ranks"))


def windows(rank: int, scripts: list[Script], rules: Rules, more: dict[str, Any]) -> dict[str, Any]:
    """The same script twice, and the truth: {"two": in two levels, "one": in one}."""
    own = more.get("options", {})
    two = {**more, "options": {**own, "device_mesh": mesh()}}
    return {"two": play(rank, scripts, rules, two), "one": play(rank, scripts, rules, more)}


def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def report(rank: int) -> dict[str, Any]:
    """What a report says of the levels, and of 4 (10 + 10) bytes in one bucket."""
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters())
    run = gradsync_fx.optimize(step, device_mesh=mesh(), backend="aot_eager")
    run.prepare(model, optimizer, torch.zeros(2, 10), torch.zeros(2, 1))
    found = run.report()
    return {"levels": [(v.name, v.ranks, v.bytes) for v in found.levels], "text": str(found)}


def refused(rank: int, kind: str) -> str:
    """The error that each rank gets."""
    model = nn.Linear(10, 1)
    optimizer = torch.optim.SGD(model.parameters())
    before = copy.deepcopy(model.state_dict())
    world = dist.new_group([0, 1, 2, 3])
    half = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])[0]
    whole = mesh()
    held = {"other ranks": whole, "on some": whole if rank % 2 else None}
    own = half if kind == "other ranks" else world
    run = gradsync_fx.optimize(step, device_mesh=held[kind], process_group=own, backend="aot_eager")
    try:
        run(model, optimizer, torch.zeros(2, 10), torch.zeros(2, 1))
    except GradSyncError as error:
        same = all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
        return f"{type(error).__name__} {error} {'nothing changed' if same else 'changed'}"
    return "nothing was raised"


def with_shards(rank: int) -> tuple[str, bool]:
    """The error of a mesh beside shared updates, and whether each of the two goes without the other."""
    given = mesh()
    text = ""
    try:
        gradsync_fx.optimize(step, device_mesh=given, shard_optimizer=True)
    except GradSyncError as error:
        text = f"{type(error).__name__} {error}"
    works = []
    for options in ({"device_mesh": given}, {"shard_optimizer": True}):
        model = nn.Linear(10, 1)
        before = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = gradsync_fx.optimize(step, backend="aot_eager", **options)  # type: ignore[arg-type]
        run(model, optimizer, torch.ones(2, 10), torch.ones(2, 1))
        works.append(not torch.equal(model.weight, before))
    return text, all(works)


def bytes_sent(store: str, rank: int, interface: str, levels: int, out: str) -> None:
    """A process of its own, in a network namespace: bytes that the interface sends and receives in one boundary."""
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=4)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1024, 512), nn.Tanh(), nn.Linear(512, 1024, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = mesh() if levels == 2 else None
    run = gradsync_fx.optimize(step, backend="aot_eager", device_mesh=given)
    sent = []
    for _ in range(3):
        dist.barrier()
        before = _counts(interface)
        dist.barrier()
        run(model, optimizer, torch.randn(4, 1024), torch.randn(4, 1024))
        dist.barrier()
        sent.append([after - was for after, was in zip(_counts(interface), before, strict=True)])
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    everyone = [torch.empty_like(weights) for _ in range(4)]
    dist.all_gather(everyone, weights)
    alike = all(torch.equal(weights, other) for other in everyone)
    Path(out).write_text(json.dumps({"sent": sent[-1], "size": size, "alike": alike}))
    dist.barrier()
    dist.destroy_process_group()


def _counts(interface: str) -> list[int]:
    held = Path("/sys/class/net", interface, "statistics")
    return [int((held / name).read_text()) for name in ("tx_bytes", "rx_bytes")]


if __name__ == "__main__":
    bytes_sent(sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5])
