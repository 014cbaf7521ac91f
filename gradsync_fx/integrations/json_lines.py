"""Records of updates as lines of JSON in a file: `optimize(..., on_update=to_json_lines("run.jsonl"))`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

from gradsync_fx.update_record import UpdateRecord


def to_json_lines(path: str | os.PathLike[str]) -> Callable[[UpdateRecord], None]:
    """Appends each record to a file, which is there, whole lines in it, after every update.

    On one rank. It asks for the loss and the norms, and so waits for the ranks and the device at each update.
    """
    file = Path(path)

    def write(record: UpdateRecord) -> None:
        with file.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps(record.as_dict()) + "\n")

    return write
