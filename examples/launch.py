"""What the examples share: their command line, and the ranks that torchrun started, if it did."""

import argparse
import shutil
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
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


@contextmanager
def ranks() -> Iterator[tuple[int, int]]:
    """This process's rank and the number of ranks; 0 and 1 where torchrun did not start it."""
    if not dist.is_torchelastic_launched():
        yield 0, 1
        return
    dist.init_process_group("gloo")
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def replicated(model: nn.Module) -> nn.Module:
    """The model in DistributedDataParallel where there are several ranks, else as it is."""
    return DistributedDataParallel(model) if dist.is_initialized() else model


def of_rank_0(value: float) -> float:
    """Rank 0's value on every rank: clocks differ, and the ranks must agree when to stop."""
    box = torch.tensor(value)
    if dist.is_initialized():
        dist.broadcast(box, 0)
    return box.item()
