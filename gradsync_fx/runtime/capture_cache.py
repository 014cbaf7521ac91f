"""The captures of one step: admitted once each, found again by what they compute or by the parameters they train."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from gradsync_fx.capture.tracer import Capture, hook_error
from gradsync_fx.ir.deferral import check_deferrable
from gradsync_fx.optim.state import in_groups
from gradsync_fx.options import Options
from gradsync_fx.runtime.accumulators import Accumulators
from gradsync_fx.runtime.captured_facts import CapturedFacts
from gradsync_fx.runtime.captured_step import CapturedStep
from gradsync_fx.runtime.consistency import Integrity
from gradsync_fx.runtime.protocol import StepObjects, StepProtocol
from gradsync_fx.runtime.refusals import another_object
from gradsync_fx.runtime.sharing import divide
from gradsync_fx.user_lines import warn_user


Retrace = Callable[[dict[str, Any]], CapturedStep | None]


class Catalogue:
    """`retrace(parameters)` captures the last call anew, with gradients for exactly these parameters.

    meet_to_save: lets all ranks come together to gather an optimizer's state.
    """

    def __init__(
        self, accumulators: Accumulators, integrity: Integrity, simulated: int | None = None
    ) -> None:
        self.captures: list[CapturedStep] = []
        self.latest: StepProtocol | None = None
        self.uncaptured: list[StepProtocol] = []
        self.retrace: Retrace = lambda parameters: None
        self.meet_to_save: Callable[[], None] = lambda: None
        self._accumulators, self._simulated = accumulators, simulated
        self._integrity = integrity
        self._by_structure: dict[tuple[Any, ...], CapturedStep] = {}

    @property
    def steps(self) -> list[StepProtocol]:
        """All that was captured, and what runs as it is."""
        return [*self.captures, *self.uncaptured]

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
            sums.place_weights(next(iter(capture.parameters.values())))
        facts = CapturedFacts.of(capture, options, self._simulated)
        if options.accumulates:
            check_deferrable(capture.step, facts.regions)
        captured = CapturedStep(
            facts, sums.sums, sums.weights, self._integrity, self.for_parameters
        )
        if capture.weighed and options.reduction != "weighted" and not self.captures:
            warn_user(f'micro_batch_weight has no effect with reduction="{options.reduction}"')
        divide(facts, self.meet_to_save)
        sums.make_room(facts, options)
        sums.early.append(captured.runner.held)
        self.captures.append(captured)
        self._by_structure[key] = captured
        return captured, True

    def admit_uncaptured(self, step: StepProtocol) -> None:
        """A step that runs as it is, with objects that none did before."""
        self._check_same_objects(step.objects)
        if step.objects.parameters:
            self._accumulators.place_weights(torch.zeros(()))
        self.uncaptured.append(step)

    def _check_same_objects(self, objects: StepObjects) -> None:
        earlier = self.steps
        for optimizer in objects.optimizers:
            held = set(map(id, in_groups(optimizer)))
            for other in (o for known in earlier for o in known.objects.optimizers):
                shared = held.intersection(map(id, in_groups(other)))
                if all(other is not o for o in objects.optimizers) and shared:
                    name = f"optimizer {type(optimizer).__name__} (id {id(optimizer):#x})"
                    raise another_object(name, "another optimizer object")
        known = self._accumulators.parameters
        for name, parameter in objects.parameters.items():
            if name in known and known[name] is not parameter:
                raise another_object(f"parameter {name!r}", "another model object")

    def closer(self) -> StepProtocol | None:
        """The latest capture that reaches an update: its tail can close a window without data."""
        if self.latest is not None and self.latest.can_close:
            return self.latest
        return next((c for c in reversed(self.steps) if c.can_close), None)

    def for_parameters(
        self, captured: CapturedStep, names: Collection[str], parts: Collection[int]
    ) -> CapturedStep | None:
        """A capture that updates exactly these parameters; None where the step would have to be called for it."""

        def fits(candidate: CapturedStep) -> bool:
            return candidate.updates and set(candidate.facts.names_of(parts)) == set(names)

        if fits(captured):
            return captured
        known = {**captured.objects.parameters, **self._accumulators.parameters}
        if all(name in known for name in names):
            fresh = self.retrace({name: known[name] for name in sorted(names)})
            if fresh is not None and fits(fresh):
                return fresh
        return next((c for c in reversed(self.captures) if fits(c)), None)
