"""How `Effects` learns what a step does: every operation, by a mode of torch's, and two attributes, by patches.

Both hold for one call of the step, and in its thread.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from gradsync_fx._torch import TorchDispatchMode
from gradsync_fx.eager.effects import Effects


@contextmanager
def following(effects: Effects | None) -> Iterator[None]:
    """The step runs inside. None: nothing is followed."""
    if effects is None:
        yield
        return
    with (
        mock.patch.object(torch.Tensor, "grad", followed_attribute(effects, "grad")),
        mock.patch.object(torch.Tensor, "data", followed_attribute(effects, "data")),
        _Operations(effects),
    ):
        yield
    effects.end()


class _Operations(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, effects: Effects) -> None:
        super().__init__()
        self._effects = effects

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Models that the user compiled stay compiled: what such a program writes, it writes on every call."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self._effects.operation(func, args, kwargs or {})


def followed_attribute(effects: Effects, name: str) -> property:
    """`Tensor.grad` and `Tensor.data` are attributes: no operation tells of them."""
    plain = vars(torch.Tensor.__base__)[name]
    mine = threading.get_ident()

    def elsewhere() -> bool:
        return threading.get_ident() != mine or effects.is_paused

    def get(tensor: torch.Tensor) -> Any:
        if name != "grad" or elsewhere():
            return plain.__get__(tensor)
        return effects.get_grad(tensor)

    def put(tensor: torch.Tensor, value: Any) -> None:
        if elsewhere() or not isinstance(value, torch.Tensor):
            plain.__set__(tensor, value)
        else:
            (effects.set_grad if name == "grad" else effects.set_data)(tensor, value)

    return property(get, put, lambda tensor: plain.__delete__(tensor))
