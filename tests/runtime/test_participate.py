"""A rank without data sends what the program of the others sends: as much, of the same dtype, in the same order."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import gradsync_fx
from gradsync_fx.ir import ops
from gradsync_fx.optimized_step import OptimizedStep
from gradsync_fx.options import Options
from gradsync_fx.runtime import participate
from gradsync_fx.runtime.captured_step import CapturedStep
from tests.drive import plain_step


def weighted_step(model: nn.Module, optimizer: Any, x: Tensor, y: Tensor) -> Tensor:
    gradsync_fx.micro_batch_weight(x.shape[0])
    return plain_step(model, optimizer, x, y)


def planned(options: dict[str, Any]) -> CapturedStep:
    """For two ranks that are not there. Buckets of two dtypes: of three layers, the second is in float64."""
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 16).double(), nn.Linear(16, 4))

    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = model

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.layers
            out: Tensor = third(second(first(x).double()).float())
            return out

    mixed = Mixed()
    step = weighted_step if options.get("reduction") == "weighted" else plain_step
    given = {"gradient_accumulation_steps": 2, "sync_each_batch": True, "bucket_cap_mb": 1e-3}
    optimized = OptimizedStep(step, Options.of({**given, **options}), simulated=2)
    optimizer = torch.optim.SGD(mixed.parameters(), lr=0.1)
    optimized.capture(mixed, optimizer, torch.randn(4, 8), torch.randn(4, 4))
    (captured,) = optimized._executor.catalogue.captures
    return captured


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "weighted"}, {"skip_nonfinite": True}, {"reduction": "sum"}],
    ids=str,
)
def test_it_sends_what_the_program_sends(
    options: dict[str, Any], dtype: torch.dtype | None
) -> None:
    captured = planned({**options, "reduce_dtype": dtype})
    program = captured.programs.build(frozenset())
    started = program.module.graph.find_nodes(op="call_function", target=ops.ALL_REDUCE)
    wanted = [(n.meta["val"].numel(), n.meta["val"].dtype, n.args[1]) for n in started]
    sent: list[tuple[int, torch.dtype, str]] = []

    def send(flat: Tensor, op: str, group: str) -> Tensor:
        assert not flat.any()
        sent.append((flat.numel(), flat.dtype, op))
        return flat

    with (
        mock.patch.object(participate, "ALL_REDUCE", send),
        mock.patch.object(participate, "WAIT", lambda flat: flat),
    ):
        participate.take_part(captured.programs.plan)
    assert len(wanted) >= 2
    assert sent == wanted
