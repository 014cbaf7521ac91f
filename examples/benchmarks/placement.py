"""Where the ranks stand: on the loopback, in two network namespaces with a slow link between, or one on each GPU."""

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch


RATE, BITS_PER_SECOND = "1gbit", 1e9


class Unavailable(Exception):
    """This machine, or this user, does not have the placement; the text says why."""


@dataclass(frozen=True)
class Place:
    """prefixes: for each rank, the command that its own stands behind. interface: whose bytes are counted, if any.

    rate: of the link, in bits per second, where that is what limits it.
    """

    title: str
    prefixes: tuple[tuple[str, ...], ...]
    device: str = "cpu"
    backend: str = "gloo"
    sockets: str = "lo"
    interface: str = ""
    rate: float | None = None

    @property
    def world(self) -> int:
        return len(self.prefixes)


@contextmanager
def loopback() -> Iterator[Place]:
    """Two ranks on this machine."""
    yield Place("two ranks, loopback", ((), ()))


@contextmanager
def slow_link() -> Iterator[Place]:
    """Two ranks in network namespaces, joined by a veth pair of limited rate. Removes both, whatever happens."""
    if missing := [name for name in ("ip", "tc") if shutil.which(name) is None]:
        raise Unavailable(f"{' and '.join(missing)} not found (Debian: iproute2)")
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    names = [f"gradsync-{os.getpid()}-{rank}" for rank in range(2)]
    made: list[str] = []
    try:
        for name in names:
            _ip("netns", "add", name)
            made.append(name)
        _ip(
            "-n",
            names[0],
            "link",
            "add",
            "link0",
            "type",
            "veth",
            "peer",
            "link0",
            "netns",
            names[1],
        )
        for rank, name in enumerate(names):
            _ip("-n", name, "address", "add", f"10.77.0.{1 + rank}/24", "dev", "link0")
            for link in ("lo", "link0"):
                _ip("-n", name, "link", "set", link, "up")
            # A small bucket: what a window saves up while it computes must not carry a gradient for free.
            limits = ("rate", RATE, "burst", "128kb", "latency", "50ms")
            _command("tc", "-n", name, "qdisc", "add", "dev", "link0", "root", "tbf", *limits)
        prefixes = tuple(("ip", "netns", "exec", name) for name in names)
        yield Place(
            f"two ranks, {RATE} link",
            prefixes,
            sockets="link0",
            interface="link0",
            rate=BITS_PER_SECOND,
        )
    finally:
        for name in made:
            # A namespace takes its end of the pair along, and with it the other end.
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


@contextmanager
def gpus() -> Iterator[Place]:
    """One rank on each GPU of this machine, over NCCL."""
    count = torch.cuda.device_count()
    if count == 0:
        raise Unavailable("no CUDA device")
    ranks = f"{count} ranks" if count > 1 else "one rank"
    yield Place(f"{ranks}, one on each GPU", ((),) * count, device="cuda", backend="nccl")


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"`{' '.join(command)}`: {done.stderr.strip() or done.returncode}")


PLACEMENTS: dict[str, Callable[[], AbstractContextManager[Place]]] = {
    "loopback": loopback,
    "1gbit": slow_link,
    "nccl": gpus,
}
