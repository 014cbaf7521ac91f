"""Records of updates in MLflow: `optimize(..., on_update=to_mlflow())` inside of `with mlflow.start_run():`."""

from __future__ import annotations

from collections.abc import Callable

import mlflow

from gradsync_fx.update_record import UpdateRecord


def to_mlflow(*, prefix: str = "") -> Callable[[UpdateRecord], None]:
    """Logs each record's numbers as metrics of the active run, the update as their step.

    On one rank. It asks for the loss and the norms, and so waits for the ranks and the device at each update.
    """

    def write(record: UpdateRecord) -> None:
        values = {prefix + name: value for name, value in record.scalars().items()}
        mlflow.log_metrics(values, step=record.update)

    return write
