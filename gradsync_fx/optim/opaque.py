"""An update whose code the trace did not see wholly: the optimizer's own `step()` makes it, between two programs.

program: ... reduce, clip -> gradients | `.grad` = gradients; optimizer.step(...); `.grad` = None | the rest: program

Right for any optimizer: hooks, attributes, wrappers and state are the user's own, and run once per update. It costs a
second program where something reads an updated parameter, and the fusion of the update with what stands before it.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.errors import UpdateError
from gradsync_fx.optim.reached import an, is_torchs
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.user_lines import warn_user


@dataclass(frozen=True, slots=True, eq=False)
class Opaque:
    """One call of an optimizer's own `step`, which runs as it is.

    which: positions of the parameters that have a gradient.
    given: the arguments of `step`, as text.
    why: it is not traced, for people.
    """

    optimizer: Optimizer
    which: tuple[int, ...]
    given: str
    why: str

    def __str__(self) -> str:
        return f"{type(self.optimizer).__name__}.step runs as it is, after the gradients are reduced: {self.why}"

    @property
    def parameters(self) -> list[torch.Tensor]:
        flat = parameters_of(self.optimizer)
        return [flat[i] for i in self.which]

    def step(self, gradients: Sequence[torch.Tensor]) -> None:
        """One update with these gradients."""
        args, kwargs, used = given_by(self.given)
        try:
            for parameter, gradient in zip(self.parameters, gradients, strict=True):
                parameter.grad = gradient
            with torch.enable_grad():  # as in the user's own loop
                returned: Any = self.optimizer.step(*args, **kwargs)
        finally:
            for parameter in parameters_of(self.optimizer):
                parameter.grad = None
        if used and returned is not None:
            raise UpdateError(
                f"{type(self.optimizer).__name__}.step",
                seen=f"it returns {an(returned)}, which the step uses; a traced step knows no value of it",
                wanted="optimizer.step() as a call of its own",
                fix="keep the value on the optimizer and read it after the call of the step; or pass "
                'on_unsupported="eager" and use it only where step.sync_gradients is True',
            )


def warn_of(updates: Mapping[str, Opaque], told: set[str]) -> None:
    """Says once of each update that it is opaque, and why."""
    for key, update in updates.items():
        if key not in told:
            told.add(key)
            warn_user(
                f"{update}. That is right for any optimizer; it costs what the compiler would have fused."
            )


def calls_its_closure_once(optimizer: Optimizer) -> bool:
    """Whether its step calls a closure once, before all else: then it may stand before the step."""
    return is_torchs(optimizer) and not isinstance(optimizer, torch.optim.LBFGS)


def closure_given(optimizer: Optimizer) -> UpdateError:
    """The error for a step that runs forward and backward by itself."""
    name = type(optimizer).__name__
    return UpdateError(
        f"{name}.step",
        seen="it is given a closure, which runs forward and backward anew inside of the update",
        wanted="one gradient for each update: optimizer.step() without a closure",
        fix="call backward in the step and optimizer.step() after it; an optimizer that needs its closure (LBFGS) "
        "trains in a loop of its own, without gradsync_fx",
    )


Given = tuple[tuple[Any, ...], dict[str, Any], bool]


def text_of(given: Given) -> str | None:
    """Arguments of `step`, and whether its result is used, as a text; None where a text cannot hold them."""
    if given == ((), {}, False):
        return ""
    text = repr(given)
    try:
        same = ast.literal_eval(text) == given
    except (ValueError, SyntaxError):
        return None
    return text if same else None


def given_by(text: str) -> Given:
    """What `text_of` was given."""
    given: Given = ast.literal_eval(text) if text else ((), {}, False)
    return given
