"""The targets: CUDA cards by their architecture, with the figures that code generation and estimates ask for."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from dataclasses import dataclass

from gradsync_fx.errors import OptionError, ToolchainError


@dataclass(frozen=True, slots=True)
class Card:
    """What the maker's data sheet says; sizes in bytes, bandwidth of its memory in bytes per second.

    hardware: the preset that estimates of time use where none is named.
    """

    arch: str
    name: str
    capability: tuple[int, int]
    processors: int
    shared_memory: int
    cache: int
    memory: int
    bandwidth: float
    hardware: str

    @property
    def target(self) -> str:
        return f"cuda:{self.arch}"


CARDS = {
    card.target: card
    for card in (
        Card("sm_80", "NVIDIA A100-SXM4-80GB", (8, 0), 108, 166912, 40 << 20, 80 << 30, 2.039e12, "a100-nvlink"),
        Card("sm_90", "NVIDIA H100 80GB HBM3", (9, 0), 132, 232448, 50 << 20, 80 << 30, 3.35e12, "h100-nvlink"),
        Card("sm_100", "NVIDIA B200", (10, 0), 148, 232448, 126 << 20, 180 << 30, 8.0e12, "b200-nvlink"),
    )
}  # fmt: skip


def find_card(target: object) -> Card:
    """The card of a target. Raises `OptionError` for one that is not known."""
    if not isinstance(target, str):
        raise OptionError(
            "argument 'target'",
            seen=f"a {type(target).__name__}",
            wanted=f"one of {', '.join(CARDS)}, as text",
            fix="where it is the step's own argument of that name, pass it by position",
        )
    if target not in CARDS:
        raise OptionError(
            f"target {target!r}",
            seen="no such target",
            wanted=f"one of {', '.join(CARDS)}",
            fix="name a target by its architecture; leave it out for a report on this machine's programs",
        )
    return CARDS[target]


def check_toolchain(target: str) -> None:
    """Raises `ToolchainError` where a compiler that the code of a target takes is missing."""
    for missing, seen, fix in (
        (sys.platform != "linux", f"this is {sys.platform}", "run it on Linux, in a container, say"),
        (
            importlib.util.find_spec("triton") is None,
            "triton is not installed (a CPU build of torch leaves it out)",
            "pip install triton",
        ),
        (
            shutil.which("g++") is None,
            "there is no g++, which builds the device guard that stands in for CUDA's",
            "install it: apt-get install g++",
        ),
    ):  # fmt: skip
        if missing:
            raise ToolchainError(
                f"target {target!r}",
                seen=seen,
                wanted="Linux, triton and g++: kernels are compiled down to the cubin",
                fix=fix,
            )
