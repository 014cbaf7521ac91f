"""What is lowered: `Case`s, as plain data that goes to the process that lowers and back."""

from __future__ import annotations

from dataclasses import dataclass


TARGETS = ("sm_80", "sm_90")


@dataclass(frozen=True, slots=True)
class Case:
    """One step for one target. k_each: two optimizers with a k each. every_choice: of block sizes is
    compiled, not only the first. fault: of faults.py, planted in the boundary."""

    model: str
    target: str = "sm_90"
    optimizer: str = "adamw"
    precision: str = "fp32"
    clip: bool = False
    weights: bool = False
    skip_nonfinite: bool = False
    k_each: bool = False
    dropout: bool = True
    attention_in_products: bool = False
    blocks: int = 1
    every_choice: bool = False
    ranks: int = 8
    bucket_cap_mb: float = 0.05
    sync_each_batch: bool = False
    fault: str = ""

    def __str__(self) -> str:
        yes = [n for n in ("clip", "weights", "skip_nonfinite", "k_each") if getattr(self, n)]
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
