"""What the examples share: their command line, the ranks that torchrun started, if it did, and each one's device."""

import argparse
import functools
import os
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def command_line(description: str | None) -> argparse.ArgumentParser:
    """A parser with the arguments that every example has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a tiny run that ends within seconds")
    parser.add_argument(
        "--backend",
        default=default_backend(),
        choices=["inductor", "aot_eager", "eager"],
        help="how the programs are lowered (default here: %(default)s)",
    )
    return parser


def default_backend() -> str:
    """Inductor where it can work: it needs a C++ compiler and Python's own headers."""
    headers = Path(sysconfig.get_path("include"), "Python.h")
    compiler = any(map(shutil.which, ("g++", "clang++")))
    return "inductor" if compiler and headers.exists() else "aot_eager"


def cards() -> int:
    """CUDA devices that torch sees and NCCL can join; other accelerators have no example."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != "cuda" or not dist.is_nccl_available():
        return 0
    return torch.accelerator.device_count()


@functools.cache
def device() -> torch.device:
    """This process's own card, where each rank of this machine has one; the CPU elsewhere."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))  # torchrun's word for it
    if here > cards():
        return torch.device("cpu")
    return torch.device("cuda", dist.get_node_local_rank(fallback_rank=0))


def group_backend() -> str:
    """NCCL joins ranks with a card each, gloo all others."""
    return "nccl" if device().type == "cuda" else "gloo"


@contextmanager
def ranks(*, joined: bool = False) -> Iterator[tuple[int, int]]:
    """This process's rank and the number of ranks; 0 and 1 where torchrun did not start it.

    joined: a process alone has a group, too.
    """
    if device().type == "cuda":
        torch.accelerator.set_device_index(device().index)
    elif cards() and dist.get_node_local_rank(fallback_rank=0) == 0:
        Console().print(f"more ranks than cards ({cards()}): they are on the CPU, over gloo")
    if dist.is_torchelastic_launched():
        joined_by_torchrun()
    elif joined:
        dist.init_process_group(group_backend(), store=dist.HashStore(), rank=0, world_size=1)
    else:
        yield 0, 1
        return
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def joined_by_torchrun() -> None:
    """The default group of the ranks that torchrun started; with names of its own for each time that it starts them.

    torch 2.13's gloo finds the addresses of the attempt before in torchrun's store, and cannot connect.
    """
    env = os.environ
    store = dist.TCPStore(env["MASTER_ADDR"], int(env["MASTER_PORT"]), is_master=False)
    own = dist.PrefixStore(f"attempt {env['TORCHELASTIC_RESTART_COUNT']}", store)
    rank, world = int(env["RANK"]), int(env["WORLD_SIZE"])
    dist.init_process_group(group_backend(), store=own, rank=rank, world_size=world)


def replicated(model: nn.Module) -> nn.Module:
    """The model on its device, in DistributedDataParallel where there is a group."""
    model.to(device())  # the same object: its parameters stay who they are
    return DistributedDataParallel(model) if dist.is_initialized() else model


def moved(batch: Any) -> Any:
    """A tensor or a module on this process's device; so for the items of a tuple, a list or a dictionary."""
    if isinstance(batch, dict):
        return {name: moved(item) for name, item in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(moved(item) for item in batch)
    return batch.to(device())


def of_rank_0(value: float) -> float:
    """Rank 0's value on every rank: clocks differ, and the ranks must agree when to stop."""
    box = torch.tensor(value, device=device())
    if dist.is_initialized():
        dist.broadcast(box, 0)
    return box.item()
