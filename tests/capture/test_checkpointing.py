"""Activation checkpointing: the same numbers as without, recomputation in the programs, less memory alive."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import gradsync_fx
from tests.drive import drive, plain_step, quick
from tests.reference import accumulation, assert_same, regression
from tests.refusals import refused


class Deep(nn.Module):
    """Six blocks of wide activations; `how` says whether each is checkpointed."""

    def __init__(self, how: str, dropout: float = 0.0) -> None:
        super().__init__()
        self.how = how
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(16, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 16), nn.Tanh()
            )
            for _ in range(6)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self._run(block, x)
        return self.last(x)

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self.how == "plain":
            return block(x)
        if self.how == "selective":
            return checkpoint(block, x, use_reentrant=False, context_fn=_save_products)
        return checkpoint(block, x, use_reentrant=self.how == "reentrant")


def _save_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])


def twins_of(how: str, dropout: float = 0.0) -> tuple[nn.Module, nn.Module]:
    plain = Deep("plain", dropout)
    other = copy.deepcopy(plain)
    other.how = how  # type: ignore[assignment]
    return plain, other


def ops_of(module: GraphModule, target: Any) -> int:
    return len(module.graph.find_nodes(op="call_function", target=target))


def peak_of_values(module: GraphModule) -> int:
    """Most bytes of intermediate tensors alive at once, in the order of the graph; views count as their own."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    last = {n: max((order[u] for u in n.users), default=order[n]) for n in order}
    alive, peak = 0, 0
    ends: dict[int, int] = {}
    for node, i in order.items():
        value = node.meta.get("val")
        if node.op == "call_function" and isinstance(value, Tensor):
            size = value.numel() * value.element_size()
            alive += size
            ends[last[node]] = ends.get(last[node], 0) + size
        peak = max(peak, alive)
        alive -= ends.get(i, 0)
    return peak


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW])
def test_equals_the_run_without_it(make: Any, backend: str) -> None:
    plain, ours = twins_of("checkpointed")
    data = regression(3, 2)
    mine = drive(
        quick(plain_step, 2, backend=backend), ours, make(ours.parameters(), lr=1e-2), data
    )
    theirs = accumulation(plain, make(plain.parameters(), lr=1e-2), data)
    assert_same(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("how", ["checkpointed", "selective"])
def test_recomputation_stays_and_saves_memory(how: str) -> None:
    (window,) = regression(1, 1, batch=64)
    found: dict[Any, tuple[int, int]] = {}
    for model in twins_of(how):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        step = quick(plain_step, 2)
        step.prepare(model, optimizer, *window[0])
        program = step.programs["accumulate"]
        found[model.how] = (ops_of(program, torch.ops.aten.gelu.default), peak_of_values(program))
    assert found["plain"][0] == 6
    assert found[how][0] == 12
    assert found[how][1] < found["plain"][1]


def test_dropout_in_a_region_sees_the_same_masks() -> None:
    """Bitwise the run without checkpointing: the draw is made once, what follows from it is computed again."""
    runs = []
    for model in twins_of("checkpointed", dropout=0.3):
        torch.manual_seed(3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        runs.append(drive(quick(plain_step, 2), model, optimizer, regression(3, 2)))
    assert_same(runs[1], runs[0], atol=0.0)


def test_reentrant_checkpoints_are_refused_by_name() -> None:
    _, model = twins_of("reentrant")
    (batch,) = regression(1, 1)[0]
    step = quick(plain_step, 2)
    optimizer: Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    error = refused(gradsync_fx.CaptureError, "checkpoint", step, model, optimizer, *batch)
    assert "test_checkpointing.py" in error.culprit
    assert "use_reentrant=False" in error.fix
