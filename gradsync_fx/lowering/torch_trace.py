"""For torch's own tools: artifacts that `TORCH_TRACE` collects and tlparse shows.

Logs need nothing of ours: `TORCH_LOGS="+gradsync_fx"` sets the level of the loggers that modules name after themselves.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from gradsync_fx._torch import trace_structured


def add_to_trace(step: str, name: str, text: Callable[[], str]) -> None:
    """Adds a file to the trace, if one is being written; `text` is not called otherwise. step: the step's name."""
    file = re.sub(r"\W+", "_", f"gradsync_fx_{step}_{name}").rstrip("_")
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": file, "encoding": "string"},
        payload_fn=text,
        expect_trace_id=False,
    )
