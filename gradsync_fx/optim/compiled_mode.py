"""torch's optimizers as they are when they are compiled: patches, for the length of one trace."""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch.optim import Optimizer

from gradsync_fx._torch import compile_lock, is_fx_symbolic_tracing
from gradsync_fx.optim.reached import plain_step
from gradsync_fx.threads import in_this_thread


def without_factors(decompositions: Any) -> Any:
    """The table of a compiler, which gets one entry more: it asks whether the factor of a difference is 1."""
    if not decompositions:
        return decompositions

    def sub(a: Any, b: Any, *, alpha: Any = 1) -> Any:
        return a - b * alpha if type(alpha) in (torch.SymFloat, torch.SymInt) else NotImplemented

    return {**decompositions, torch.ops.aten.sub.Tensor: sub}


@contextmanager
def as_when_compiled(optimizer: Optimizer) -> Iterator[None]:
    """Optimizers take their traceable branches; `min` and `max` in the optimizer's file accept symbols.

    One thread at a time.
    """
    home = inspect.unwrap(plain_step(optimizer)).__globals__

    def chosen(plain: Any, symbolic: Any) -> Any:
        def choose(*args: Any, **kwargs: Any) -> Any:
            if any(isinstance(a, torch.SymFloat | torch.SymInt) for a in args):
                result = args[0]
                for other in args[1:]:
                    result = symbolic(result, other)
                return result
            return plain(*args, **kwargs)

        return choose

    pair = {"min": chosen(min, torch.sym_min), "max": chosen(max, torch.sym_max)}
    square = in_this_thread(lambda self: self.pow_(2), torch.Tensor.square_)
    with (
        compile_lock,
        mock.patch("torch.compiler.is_compiling", _compiling_here(torch.compiler.is_compiling)),
        # functionalize has no rule for this one composite op.
        mock.patch.object(torch.Tensor, "square_", square),
        mock.patch.dict(home, {k: v for k, v in pair.items() if k not in home}),
    ):
        yield


def _compiling_here(plain: Any) -> Any:
    """`torch.compiler.is_compiling`, true in this thread: an optimizer that runs in another one does so eagerly.

    True there as well where a compiled function asks whether it is being traced: torch's flag for that is one for all
    threads, and this trace sets it.
    """
    mine, tracing = threading.get_ident(), is_fx_symbolic_tracing.__code__

    def is_compiling() -> bool:
        here = threading.get_ident() == mine
        return here or sys._getframe(1).f_code is tracing or plain()

    return is_compiling


def settle_flavour(group: dict[str, Any], *, capturable: bool) -> None:
    """One parameter at a time: what a compiler wants, with the same arithmetic."""
    if capturable and "capturable" in group:
        group["capturable"] = True
    if "foreach" in group:
        group["foreach"] = False
    if group.get("fused"):
        group["fused"] = False
