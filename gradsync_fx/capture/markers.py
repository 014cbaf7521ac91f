"""Calls by which a step tells its trace something: the micro-batch's weight, and that it has ended."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


class _Traced:
    """Methods that have handlers in a trace (handlers.py); outside of one they do nothing."""

    def weigh(self, weight: float | torch.Tensor) -> None: ...

    def end(self, demand: str, keep_gradients: bool) -> None: ...


TRACED = _Traced()


def micro_batch_weight(weight: float | torch.Tensor) -> None:
    """Says, inside a step, how much this micro-batch counts: the number of its tokens, for a mean over tokens.

    With `reduction="weighted"` the window's gradient is sum(w g) / sum(w) over its micro-steps and all ranks. weight:
    a number, or a tensor of one element of any real dtype; not negative. Call it once in each call of the step,
    anywhere in it. In a step that runs without gradsync_fx it does nothing.

    >>> def train_step(model, optimizer, x, y):
    ...     gradsync_fx.micro_batch_weight(x.shape[0])
    ...     loss = (model(x) - y).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    ...     optimizer.zero_grad()
    >>> step = gradsync_fx.optimize(
    ...     train_step, gradient_accumulation_steps=2, reduction="weighted"
    ... )
    """
    TRACED.weigh(weight)


@dataclass(slots=True)
class Demand:
    """Parameters that the next trace must give a gradient, of zeros where the step gives none.

    `key` is what Dynamo guards on: a step that was traced under one demand is not run under another. deferred: what the
    latest call left to be done with an update.
    """

    key: str = ""
    parameters: tuple[torch.Tensor, ...] = ()
    deferred: Sequence[Callable[[], None]] = ()
