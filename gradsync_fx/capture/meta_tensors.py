"""Swaps tensors for fake ones during a trace: those on the meta device for the CPU's, or all for a target's.

torch cannot trace some losses on meta tensors, and a target's device is not there to hold any. Modules and optimizers
are those that the step could reach (reachable.py). They have their own tensors back at the end, also on errors.
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gradsync_fx._torch import FakeTensorMode, tree_leaves, tree_map_only
from gradsync_fx.capture.reachable import discover
from gradsync_fx.code_uses import cells_of, globals_used, names_around


@contextmanager
def stand_ins(
    function: Callable[..., Any], args: Any, kwargs: Any, device: torch.device | None = None
) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Arguments for a trace, in which no tensor lies on the meta device, or all lie on `device`."""
    swap = _Swap(device)
    try:
        found = discover(function, args, kwargs)
        for _, module in found.modules:
            swap.module(module)
        for optimizer in found.optimizers:
            swap.optimizer(optimizer)
        if device is not None:
            swap.names_of(function)
            for leaf in tree_leaves((args, kwargs)):
                swap.batch(leaf)
        yield tree_map_only(torch.Tensor, swap.tensor, (args, kwargs))
    finally:
        swap.undo()


class _Swap:
    """Which tensor stands for which, and how to go back."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._mode = FakeTensorMode()
        self._made: dict[int, torch.Tensor] = {}
        self._back: list[Callable[[], object]] = []

    def tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if not self._goes(tensor):
            return tensor
        if id(tensor) not in self._made:
            with self._mode:
                fake = torch.empty_strided(
                    tensor.shape,
                    tensor.stride(),
                    dtype=tensor.dtype,
                    device=self._device or torch.device("cpu"),
                    requires_grad=tensor.requires_grad and tensor.is_leaf,
                )
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=tensor.requires_grad)
            self._made[id(tensor)] = fake
            self._back.append(lambda kept=tensor: kept)  # type: ignore[misc]  # an id may not be used anew
        return self._made[id(tensor)]

    def module(self, root: nn.Module) -> None:
        for module in root.modules():
            lists = [v for v in vars(module).values() if isinstance(v, list)]  # weights of an LSTM
            for held in (module._parameters, module._buffers, vars(module)):
                self._in(held, list(held))
            for weights in lists:
                self._in(weights, list(range(len(weights))))

    def optimizer(self, optimizer: Optimizer) -> None:
        for group in getattr(optimizer, "param_groups", ()):
            self._in(group["params"], list(range(len(group["params"]))))
        if self._device is not None and isinstance(getattr(optimizer, "state", None), dict):
            self._state(optimizer.state)

    def _state(self, state: dict[Any, Any]) -> None:
        """Under the stand-ins of its parameters. Counters stay on the CPU: there optimizers keep them."""
        before = dict(state)
        for key, held in before.items():
            if isinstance(key, torch.Tensor) and isinstance(held, dict):
                state[self.tensor(key)] = {
                    name: self.tensor(v) if isinstance(v, torch.Tensor) and v.dim() else v
                    for name, v in held.items()
                }
                if self._goes(key):
                    del state[key]
        self._back.append(lambda: state.update(before))
        self._back.append(state.clear)

    def names_of(self, function: Any) -> None:
        """Tensors that a step finds by name: around it, and among its globals."""
        function = getattr(function, "__func__", function)
        if not isinstance(function, FunctionType):
            return
        self._in(function.__globals__, list(globals_used(function)))
        around, cells = names_around(function), cells_of(function)
        for name, before in around.items():
            if isinstance(before, torch.Tensor) and self._goes(before):
                cells[name].cell_contents = self.tensor(before)
                self._back.append(
                    lambda c=cells[name], v=before: setattr(c, "cell_contents", v)  # type: ignore[misc]
                )

    def batch(self, leaf: Any) -> None:
        """An argument that is no tensor and may hold some: a batch of transformers, a dataclass."""
        if isinstance(leaf, UserDict):
            self._in(leaf.data, list(leaf.data))
        elif not isinstance(leaf, nn.Module | Optimizer | type) and hasattr(leaf, "__dict__"):
            self._in(vars(leaf), list(vars(leaf)))

    def _goes(self, tensor: torch.Tensor) -> bool:
        if self._device is None:
            return tensor.device.type == "meta"
        return tensor.device != self._device or not hasattr(tensor, "fake_mode")

    def _in(self, holder: Any, keys: list[Any]) -> None:
        for key in keys:
            before = holder[key]
            if isinstance(before, torch.Tensor) and self._goes(before):
                holder[key] = self.tensor(before)
                self._back.append(lambda h=holder, k=key, v=before: h.__setitem__(k, v))  # type: ignore[misc]

    def undo(self) -> None:
        for back in reversed(self._back):
            back()
