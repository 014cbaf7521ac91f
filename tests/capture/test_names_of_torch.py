"""Names of torch's classes in a step, as PEFT's DoRA reads them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.drive import quick
from tests.reference import mse, regression


@pytest.mark.captured
def test_the_module_of_a_parameters_class_is_a_constant() -> None:
    seen: list[tuple[str, str]] = []

    def step(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> Tensor:
        cls = type(model.weight)
        if cls.__module__.startswith("torchao."):
            raise AssertionError("not a parameter of torchao's")
        seen.append((cls.__name__, cls.__module__))
        loss = mse(model, x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = quick(step, 2)
    for batch in regression(1, 2)[0]:
        run(model, optimizer, *batch)
    assert seen == [("Parameter", "torch.nn.parameter")] * 2
