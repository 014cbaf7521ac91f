"""What is lowered: `Case`s, and what comes of comparing, as plain data between processes."""

from __future__ import annotations

from dataclasses import dataclass


TARGETS = ("sm_80", "sm_90")
PROGRAMS = ("accumulate", "boundary", "tail")
MICRO_STEPS = PROGRAMS[:2]
OPTIONS = ("clip", "weights", "skip_nonfinite", "k_each", "checkpointing", "wire", "dynamic")


@dataclass(frozen=True, slots=True)
class Case:
    """One step for one target.

    k_each: two optimizers with a k each. checkpointing: the middle of the model is computed again in backward. wire:
    gradients are reduced in bfloat16. dynamic: the batch has any number of rows. cubins: of kernels, for the "first"
    choice of block sizes, or for "every" one; else kernels stay sources. programs: those that are lowered. fault: of
    faults.py, planted in the boundary. without: optimizations that are left out.
    """

    model: str
    target: str = "sm_90"
    optimizer: str = "adamw"
    precision: str = "fp32"
    clip: bool = False
    weights: bool = False
    skip_nonfinite: bool = False
    k_each: bool = False
    checkpointing: bool = False
    wire: bool = False
    dynamic: bool = False
    attention_in_products: bool = False
    blocks: int = 1
    cubins: str = ""
    ranks: int = 8
    bucket_cap_mb: float = 0.05
    sync_each_batch: bool = False
    programs: tuple[str, ...] = PROGRAMS
    fault: str = ""
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        yes = [name for name in OPTIONS if getattr(self, name)]
        return "-".join(
            [
                self.model,
                self.optimizer,
                self.precision,
                *yes,
                self.target,
                *filter(None, [self.fault]),
            ]
        )


def plain(model: str, target: str = "sm_90") -> Case:
    """With AdamW and no option, down to the cubin: what several files of tests look at."""
    every = (model, target) == ("mlp", "sm_90")
    return Case(model, target, cubins="every" if every else "first")


@dataclass(frozen=True, slots=True)
class Compared:
    """How a program's kernels compare with its graph on the CPU, over all outputs and inputs that are written.

    worst: relative difference of values that no rounding to bfloat16 goes into. rounding: of the others, the distance
    of the kernels' from those of float32, as a multiple of the CPU's own. changed: inputs that are written.
    """

    worst: float
    rounding: float
    changed: int
