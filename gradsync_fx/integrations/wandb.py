"""Records of updates in Weights & Biases: `optimize(..., on_update=to_wandb(wandb.init(project="mine")))`."""

from __future__ import annotations

from collections.abc import Callable

from wandb import Run

from gradsync_fx.update_record import UpdateRecord


def to_wandb(run: Run, *, prefix: str = "") -> Callable[[UpdateRecord], None]:
    """Logs each record's numbers, the update among them, without a step: the run's own goes on as the caller's logs do.

    On one rank. It asks for the loss and the norms, and so waits for the ranks and the device at each update.
    """

    def write(record: UpdateRecord) -> None:
        run.log({prefix + "update": record.update, **_named(prefix, record.scalars())})

    return write


def _named(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {prefix + name: value for name, value in values.items()}
