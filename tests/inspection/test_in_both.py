"""Which nodes of the boundary program the accumulate program has, too."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import gradsync_fx


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


def test_only_the_micro_step_and_its_sums_are_in_both() -> None:
    model = nn.Linear(4, 3)
    report = gradsync_fx.explain(
        train_step,
        model,
        torch.optim.AdamW(model.parameters()),
        torch.randn(2, 4),
        gradient_accumulation_steps=4,
        world_size=2,
    )
    both = {n.name for n in report.graph if n.programs == ("accumulate", "boundary")}
    for node in report.graph:
        if node.region in ("input", "forward", "backward"):
            assert node.name in both, node
        elif node.region == "optimizer":
            assert node.name not in both, node
    sums = {n.op for n in report.graph if n.region == "gradient sync" and n.name in both}
    assert sums == {"aten.add.Tensor"}
