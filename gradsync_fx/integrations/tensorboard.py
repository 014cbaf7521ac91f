"""Records of updates in TensorBoard: `optimize(..., on_update=to_tensorboard(SummaryWriter("runs")))`."""

from __future__ import annotations

from collections.abc import Callable

from torch.utils.tensorboard import SummaryWriter

from gradsync_fx.update_record import UpdateRecord


def to_tensorboard(writer: SummaryWriter, *, prefix: str = "") -> Callable[[UpdateRecord], None]:
    """Adds each record's numbers as scalars, the update as their step. The writer stays the caller's, to be closed.

    On one rank. It asks for the loss and the norms, and so waits for the ranks and the device at each update.
    """

    def write(record: UpdateRecord) -> None:
        for name, value in record.scalars().items():
            writer.add_scalar(prefix + name, value, record.update)

    return write
