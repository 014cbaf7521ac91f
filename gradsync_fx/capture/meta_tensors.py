"""Swaps meta tensors for fake CPU tensors during a trace: torch cannot trace some losses on meta tensors.

Modules and optimizers are those that the step could reach (reachable.py). They have their own tensors back at the end,
also on errors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsync_fx._torch import FakeTensorMode, tree_map_only
from gradsync_fx.capture.reachable import discover


@contextmanager
def stand_ins(
    function: Callable[..., Any], args: Any, kwargs: Any
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Arguments for a trace, in which no tensor lies on the meta device."""
    swap = _Swap()
    try:
        found = discover(function, args, kwargs)
        for _, module in found.modules:
            swap.module(module)
        for optimizer in found.optimizers:
            swap.optimizer(optimizer)
        yield tree_map_only(torch.Tensor, swap.tensor, (args, kwargs))
    finally:
        swap.undo()


class _Swap:
    """Which tensor stands for which, and how to go back."""

    def __init__(self) -> None:
        self._mode = FakeTensorMode()
        self._made: dict[int, torch.Tensor] = {}
        self._back: list[Callable[[], object]] = []

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "meta":
            return tensor
        if id(tensor) not in self._made:
            with self._mode:
                fake = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu"
                )
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = fake
            self._back.append(lambda kept=tensor: kept)  # type: ignore[misc]  # an id may not be used anew
        return self._made[id(tensor)]

    def module(self, root: nn.Module) -> None:
        for module in root.modules():
            for held in (module._parameters, module._buffers):
                self._in(held, list(held))

    def optimizer(self, optimizer: Optimizer) -> None:
        for group in getattr(optimizer, "param_groups", ()):
            self._in(group["params"], list(range(len(group["params"]))))

    def _in(self, holder: Any, keys: list[Any]) -> None:
        for key in keys:
            before = holder[key]
            if isinstance(before, torch.Tensor) and before.device.type == "meta":
                holder[key] = self.tensor(before)
                self._back.append(lambda h=holder, k=key, v=before: h.__setitem__(k, v))  # type: ignore[misc]

    def undo(self) -> None:
        for back in reversed(self._back):
            back()
