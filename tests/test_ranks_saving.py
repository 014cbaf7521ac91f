"""Two ranks, stopped at every position of a window and resumed in new processes: bitwise the run that never stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.scenarios import saving
from tests.workers import Ranks


pytestmark = pytest.mark.gloo


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("files", {"backend": "aot_eager"}),
        ("files", {"backend": "aot_eager", "reduction": "weighted"}),
        ("dcp", {"backend": "aot_eager"}),
        pytest.param("files", {"backend": "inductor"}, marks=pytest.mark.inductor),
    ],
)
def test_resumed_in_new_processes(
    ranks: Ranks, tmp_path: Path, how: str, options: dict[str, Any]
) -> None:
    wanted = ranks(saving.save_and_resume, how, str(tmp_path), options, [None])
    ranks.stop()
    stops = list(range(saving.CALLS)) if options["backend"] == "aot_eager" else [2, 4]
    found = ranks(saving.save_and_resume, how, str(tmp_path), options, stops)
    for (through,), resumed in zip(wanted, found, strict=True):
        assert through["count"].tolist() == [saving.CALLS, saving.CALLS // saving.K]
        for stop, tensors in zip(stops, resumed, strict=True):
            assert tensors.keys() == through.keys()
            for name, tensor in tensors.items():
                assert torch.equal(tensor, through[name]), f"{name} after a stop at {stop}"
