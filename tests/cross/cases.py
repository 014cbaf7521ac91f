"""What is lowered: `Case`s, and what comes of comparing, as plain data between processes."""

from __future__ import annotations

from dataclasses import dataclass, replace


TARGETS = ("sm_80", "sm_90")
PROGRAMS = ("accumulate", "boundary", "tail")
MICRO_STEPS = PROGRAMS[:2]
OPTIONS = ("clip", "weights", "skip_nonfinite", "k_each", "checkpointing", "wire", "dynamic")


@dataclass(frozen=True, slots=True)
class Case:
    """One step for one target.

    k_each: two optimizers with a k each. checkpointing: the middle of the model is computed again in backward. wire:
    gradients are reduced in bfloat16. dynamic: the batch has any number of rows. every_choice: of block sizes is
    compiled, not only the first. programs: those that are lowered. fault: of faults.py, planted in the boundary.
    without: optimizations that are left out.
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
    every_choice: bool = False
    ranks: int = 8
    bucket_cap_mb: float = 0.05
    sync_each_batch: bool = False
    programs: tuple[str, ...] = PROGRAMS
    fault: str = ""
    without: tuple[str, ...] = ()

    def serves(self, other: Case) -> bool:
        """Whether what is made for this case is, in parts or in whole, what is made for the other."""
        whole = {"programs": PROGRAMS, "every_choice": True}
        more = {*self.programs}.issuperset(
            other.programs
        ) and self.every_choice >= other.every_choice
        return more and replace(self, **whole) == replace(other, **whole)

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


@dataclass(frozen=True, slots=True)
class Compared:
    """How a program's kernels compare with its graph on the CPU, over all outputs and inputs that are written.

    worst: relative difference of values that no rounding to bfloat16 goes into. rounding: of the others, the distance
    of the kernels' from those of float32, as a multiple of the CPU's own. changed: inputs that are written.
    """

    worst: float
    rounding: float
    changed: int
