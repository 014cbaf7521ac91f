"""Scripts whose ranks take the CPU for a device: programs mask an empty window, and the host learns it later."""

from __future__ import annotations

from typing import Any
from unittest import mock

from gradsync_fx.runtime import captured_facts
from gradsync_fx.runtime.captured_step import CapturedStep
from tests.scripts import play
from tests.truth import Rules, Script


def behind(rank: int, scripts: list[Script], rules: Rules, more: dict[str, Any]) -> dict[str, Any]:
    """As `play`, with the number of windows that were closed before it was known whether they counted."""
    with (
        mock.patch.object(captured_facts, "runs_behind", return_value=True),
        mock.patch.object(
            CapturedStep, "_close_masked", autospec=True, side_effect=CapturedStep._close_masked
        ) as masked,
    ):
        found = play(rank, scripts, rules, more)
    return found | {"masked": masked.call_count}
