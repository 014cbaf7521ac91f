"""The captures of one step: admitted once each, found again by what they compute or by the parameters they train."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from gradsync_fx.capture.tracer import Capture, hook_error
from gradsync_fx.errors import WindowError
from gradsync_fx.ir.deferral import check_deferrable
from gradsync_fx.optim.state import in_groups
from gradsync_fx.options import Options
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.eager_step import EagerStep, Objects
from gradsync_fx.user_lines import warn_user


class Found(Exception):
    """Ends a call that only asks which capture its arguments lead to: nothing of the step may run."""

    def __init__(self, captured: CapturedStep) -> None:
        super().__init__()
        self.captured = captured


Retrace = Callable[[dict[str, Any]], CapturedStep | None]


class Catalogue:
    """`retrace(parameters)` captures the last call anew, with gradients for exactly these parameters."""

    def __init__(
        self, accumulators: Accumulators, integrity: Integrity, simulated: int | None = None
    ) -> None:
        self.captures: list[CapturedStep] = []
        self.latest: CapturedStep | EagerStep | None = None
        self.eager: list[EagerStep] = []
        self.retrace: Retrace = lambda parameters: None
        self._accumulators, self._simulated = accumulators, simulated
        self._integrity = integrity
        self._by_structure: dict[tuple[Any, ...], CapturedStep] = {}

    @property
    def steps(self) -> list[CapturedStep | EagerStep]:
        """All that was captured, and what runs eagerly."""
        return [*self.captures, *self.eager]

    def admit(self, capture: Capture, options: Options) -> tuple[CapturedStep, bool]:
        """The captured step for a capture, and whether it is new.

        A capture that computes what an earlier one does is the earlier one: Dynamo traces anew when any Python value
        that it guards on changes, also where the graph stays the same.
        """
        self._check_same_objects(capture)
        if capture.hooked:
            raise hook_error(capture.hooked[0])
        calls = tuple((id(c.owner), c.method, c.arguments) for c in capture.host_calls)
        key = (capture.step.structure(), calls)
        known = self._by_structure.get(key)
        if known is not None:
            return known, False
        sums = self._accumulators
        if capture.parameters:
            sums.place_weights(next(iter(capture.parameters.values())).device)
        captured = CapturedStep(
            capture, options, sums.sums, sums.weights, self._integrity, self._simulated
        )
        if options.accumulates:
            check_deferrable(capture.step, captured.regions)
        if capture.weighed and options.reduction != "weighted" and not self.captures:
            warn_user(f'micro_batch_weight has no effect with reduction="{options.reduction}"')
        sums.make_room(captured, options)
        self.captures.append(captured)
        self._by_structure[key] = captured
        return captured, True

    def admit_eager(self, step: EagerStep) -> EagerStep:
        """The eager step for these objects: an earlier one, or this."""
        self._check_same_objects(step.capture)
        for known in self.eager:
            if known.capture.same_as(step.capture):
                return known
        if step.capture.parameters:
            self._accumulators.place_weights(torch.device("cpu"))
        self.eager.append(step)
        return step

    def _check_same_objects(self, capture: Capture | Objects) -> None:
        earlier = self.steps
        for optimizer in capture.optimizers:
            held = set(map(id, in_groups(optimizer)))
            for other in (o for known in earlier for o in known.capture.optimizers):
                shared = held.intersection(map(id, in_groups(other)))
                if all(other is not o for o in capture.optimizers) and shared:
                    name = f"optimizer {type(optimizer).__name__} (id {id(optimizer):#x})"
                    raise _other(name, "another optimizer object")
        known = self._accumulators.parameters
        for name, parameter in capture.parameters.items():
            if name in known and known[name] is not parameter:
                raise _other(f"parameter {name!r}", "another model object")

    def closer(self) -> CapturedStep | EagerStep | None:
        """The latest capture that reaches an update: its tail can close a window without data."""
        if self.latest is not None and self.latest.can_close:
            return self.latest
        return next((c for c in reversed(self.steps) if c.can_close), None)

    def for_parameters(
        self, captured: CapturedStep, names: Collection[str], parts: Collection[int]
    ) -> CapturedStep | None:
        """A capture that updates exactly these parameters; None where the step would have to be called for it."""

        def fits(candidate: CapturedStep) -> bool:
            return candidate.updates and set(candidate.names_of(parts)) == set(names)

        if fits(captured):
            return captured
        known = {**captured.capture.parameters, **self._accumulators.parameters}
        if all(name in known for name in names):
            fresh = self.retrace({name: known[name] for name in sorted(names)})
            if fresh is not None and fits(fresh):
                return fresh
        return next((c for c in reversed(self.captures) if fits(c)), None)


def _other(culprit: str, what: str) -> WindowError:
    return WindowError(
        culprit,
        seen=f"this step was captured with {what} before",
        wanted="the same model and optimizer at every call",
        fix="make a step of its own for it: gradsync_fx.optimize(train_step, ...)",
    )
