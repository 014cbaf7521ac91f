"""Each rank keeps its part of the optimizer's state and makes its part of the update, with the same parameters.

It trains twice, with and without `shard_optimizer`, and saves the parts with torch's checkpoints. Alone,
where there is nothing to share out, or on two ranks:

    python examples/sharded_optimizer.py
    torchrun --nproc-per-node 2 examples/sharded_optimizer.py
"""

import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from rich.console import Console
from torch import Generator, nn
from torch.optim import Optimizer

import gradsync_fx
from launch import command_line, moved, ranks, replicated


WINDOW = 4  # micro-steps


def train_step(model, optimizer, x, y):
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def trained(rank: int, calls: int, backend: str, *, shard: bool) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(0)  # the same weights on every rank
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))
    model = replicated(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    options = {"gradient_accumulation_steps": WINDOW, "backend": backend}
    step = gradsync_fx.optimize(train_step, shard_optimizer=shard, **options)
    source = Generator().manual_seed(rank)
    for _ in range(calls):
        x = torch.randn(16, 64, generator=source)
        step(model, optimizer, *moved((x, x[:, :8].argmax(1))))
    return net, optimizer


def megabytes(optimizer: Optimizer) -> float:
    """Of the state that lies on this rank."""
    held = [v for state in optimizer.state.values() for v in state.values()]
    return sum(v.nbytes for v in held if torch.is_tensor(v) and v.device.type != "meta") / 1e6


def main() -> None:
    parser = command_line(__doc__.splitlines()[0])
    args = parser.parse_args()
    calls = WINDOW * (3 if args.quick else 25)
    with ranks() as (rank, world), tempfile.TemporaryDirectory() as folder:
        console = Console(quiet=rank > 0, soft_wrap=True)
        net, optimizer = trained(rank, calls, args.backend, shard=True)
        whole, other = trained(rank, calls, args.backend, shard=False)
        shares = f"{megabytes(optimizer):.2f} MB of {megabytes(other):.2f} MB"
        console.print(f"{world} rank(s): each holds {shares} of the optimizer's state")
        if world > 1:
            dist.broadcast_object_list(box := [folder])  # rank 0's
            shards = gradsync_fx.OptimizerShards(optimizer)  # each rank writes its own part
            dcp.save({"model": net.state_dict(), "optimizer": shards}, checkpoint_id=box[0])
            console.print("saved in parts; optimizer.state_dict() would gather them on every rank")
            dist.barrier()  # the folder is rank 0's
        apart = max(
            (a - b).abs().max().item()
            for a, b in zip(net.parameters(), whole.parameters(), strict=True)
        )
        console.print(f"parameters with and without are {apart:g} apart")


if __name__ == "__main__":
    main()
