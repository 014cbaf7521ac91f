"""A module whose step, model and optimizer are globals of it: what a user imports from a file of their own."""

from __future__ import annotations

import torch
from torch import Tensor


torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)


def train_step(x: Tensor, y: Tensor) -> Tensor:
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
