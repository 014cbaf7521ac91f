"""Numbers that a step draws with NumPy are refused: Dynamo would draw them with torch, from its generator.

They would have the right distribution, and be others than without capture; a seed of NumPy's would mean nothing, and
ranks that share one would draw apart.
"""

from __future__ import annotations

from typing import Any

from gradsync_fx._torch import NumpyVariable
from gradsync_fx.capture.trace_state import refuse


def is_numpys_generator(owner: Any) -> bool:
    """Whether an object draws numbers for NumPy: its own one, or one that the user made."""
    return type(owner).__module__.startswith("numpy.random")


def refuse_numpy_draw(tx: Any, called: Any) -> None:
    """Ends the trace where `called`, one of Dynamo's variables, is a function of NumPy's generator.

    Generators that the user makes are objects, whose methods Dynamo traces no further.
    """
    if not isinstance(called, NumpyVariable):
        return
    if not is_numpys_generator(getattr(called.value, "__self__", None)):
        return
    refuse(
        tx,
        f"np.random.{called.value.__name__}",
        seen="it uses NumPy's generator, and a program draws from torch's: its numbers would be others",
        wanted="numbers of torch's generator, or numbers that are given to the step",
        fix="draw with torch (torch.rand, torch.randn), or ahead of the step, as one of its arguments; or pass "
        'on_unsupported="eager"',
    )
