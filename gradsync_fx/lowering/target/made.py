"""What was made of a step's programs for a target, as data: kernels, launches, and what a CUDA graph can record."""

from __future__ import annotations

from dataclasses import dataclass

from gradsync_fx.ir.journal import Recording


@dataclass(frozen=True, slots=True)
class KernelCode:
    """One kernel of a program, and where in the step it comes from.

    kind: "triton", or "library" for those of cuBLAS, cuDNN or torch itself, whose code is not made here. regions,
    lines: of the nodes that it computes. launches: in one call of the program. source: Triton's code. registers,
    spilled, cubin: of a thread, bytes of a thread's stack, bytes of the binary; for the first choice of block sizes.
    """

    name: str
    kind: str
    regions: tuple[str, ...]
    lines: tuple[str, ...]
    launches: int
    source: str = ""
    registers: int = 0
    spilled: int = 0
    cubin: int = 0


@dataclass(frozen=True, slots=True)
class ProgramCode:
    """One program as code for a target; counts are of one call.

    launches: kernels started, Triton's and the libraries'. temporaries: buffers that it makes for itself. bytes: what
    its kernels read and write of the card's memory, by Inductor's count; seconds: estimated, from these and the FLOPs.
    """

    name: str
    kernels: tuple[KernelCode, ...]
    launches: int
    reductions: int
    temporaries: int
    recording: Recording
    bytes: int
    flops: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TargetCode:
    """The programs of a step as code for a card that is not there."""

    target: str
    card: str
    programs: tuple[ProgramCode, ...]
