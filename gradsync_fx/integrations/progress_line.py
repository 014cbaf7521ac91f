"""Records of updates as one line in the terminal that goes on: `on_update=to_progress_line(total=1000)`."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from gradsync_fx.update_record import UpdateRecord


def to_progress_line(
    total: int | None = None, *, console: Console | None = None
) -> Callable[[UpdateRecord], None]:
    """A bar with the number of updates, the latest loss, norm and seconds of a window. total: updates of the run.

    On one rank. It asks for the loss and the norm, and so waits for the ranks and the device at each update. The line
    is left as it is after update `total`; without that number, when the program ends.
    """
    progress = Progress(
        TextColumn("update"),
        MofNCompleteColumn(),
        BarColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeRemainingColumn(),
        console=console,
    )
    task = progress.add_task("update", total=total, numbers="")

    def show(record: UpdateRecord) -> None:
        progress.start()
        progress.update(task, completed=record.update, numbers=_numbers(record))
        if total is not None and record.update >= total:
            progress.stop()

    return show


def _numbers(record: UpdateRecord) -> str:
    loss, norm = record.loss, record.gradient_norm
    shown = [] if loss is None else [f"loss {loss:.4g}"]
    shown += [] if norm is None else [f"norm {norm:.3g}"]
    return "  ".join([*shown, f"{record.accumulate_seconds + record.boundary_seconds:.3g} s"])
