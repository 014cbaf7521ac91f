"""The window of a step that cannot be captured: one call at a time, with the counters of the executor."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gradsync_fx._torch import started_collectives, tree_leaves, tree_map_only
from gradsync_fx.capture.reachable import Found, discover
from gradsync_fx.comm.collectives import OwnCollectives
from gradsync_fx.comm.rendezvous import ACCUMULATE, BOUNDARY, Meeting
from gradsync_fx.eager.call import EagerCall
from gradsync_fx.eager.following import following
from gradsync_fx.eager.patches import answering
from gradsync_fx.eager.rebound import containers, put_back, tensors_in_place
from gradsync_fx.eager.step import EagerStep
from gradsync_fx.errors import CaptureError, NoOptimizerError
from gradsync_fx.runtime.ending import Closed
from gradsync_fx.runtime.executor import Executor
from gradsync_fx.runtime.window import NONE, WindowState
from gradsync_fx.user_lines import warn_user


class EagerWindow:
    """Runs `function` in windows as the executor's counter has them. why: what kept it from being captured.

    A call that raises before anything was added leaves the window as it was; after that it is void (consistency.py).
    latest: the step of the latest call or `prepare`.
    """

    def __init__(self, function: Callable[..., Any], executor: Executor, why: CaptureError) -> None:
        self._function, self._executor = function, executor
        # Without its traceback, whose frames hold the step.
        self.why = CaptureError(why.culprit, seen=why.seen, wanted=why.wanted, fix=why.fix)
        self._steps: dict[tuple[int, ...], EagerStep] = {}  # by the objects that a call was given
        self.latest: EagerStep | None = None
        inner = inspect.unwrap(getattr(function, "__func__", function))
        self._globals: dict[str, Any] = getattr(inner, "__globals__", {})

    def warn(self) -> None:
        """Once, when the step is known to run so."""
        warn_user(
            f"the step runs eagerly, as it cannot be captured ({self.why.culprit}: {self.why.seen}). Its windows are "
            "the same; what is lost is the rewrite: nothing is compiled, and no reduction is overlapped."
        )

    def prepare(self, args: Any, kwargs: Any) -> None:
        """Room for what a window may hold, without a call."""
        step = self._step_for(args, kwargs)
        held = {n for i in range(len(step.objects.optimizers)) for n in step.held_by(i)}
        known = step.objects.parameters
        wanted = {name: known[name] for name in sorted(held) if known[name].requires_grad}
        self._executor.accumulators.make(wanted, known, step.options)

    def _step_for(self, args: Any, kwargs: Any) -> EagerStep:
        plain = (torch.Tensor, int, float, str, type(None))
        objects = [v for v in tree_leaves((args, kwargs)) if not isinstance(v, plain)]
        key = tuple(map(id, objects))
        if key not in self._steps:
            self._steps[key] = self._known_or_new(discover(self._function, args, kwargs))
        step = self.latest = self._steps[key]
        if self._executor.setting is None:
            self._executor.catalogue.latest = step
            self._executor.begin(step)
        return step

    def _known_or_new(self, found: Found) -> EagerStep:
        executor = self._executor
        fresh = EagerStep(found, executor.options, executor.accumulators.sums, self.why)
        for known in self._steps.values():
            if known.objects.same_as(fresh.objects):
                return known
        executor.catalogue.admit_uncaptured(fresh)
        return fresh

    def run(self, args: Any, kwargs: Any) -> Any:
        """One micro-step."""
        executor, step = self._executor, self._step_for(args, kwargs)
        executor.settle_all()
        if executor.catalogue.latest is not step or not step.actions:
            executor.accumulators.drop_gradients(step.objects.parameters)
        executor.accumulators.check_trainable(step.objects.parameters, executor.next_place())
        executor.accumulators.make({}, step.objects.parameters, executor.options)
        executor.catalogue.latest, step.norms = step, []
        after = executor.window.called(summed=True)
        manual = executor.options.manual
        closing = NONE if manual else executor.closing(step)
        meeting = None
        if closing or step.speaks_in_every_call:
            kind = BOUNDARY if closing else ACCUMULATE
            meeting = executor.meet(step, kind, closing, after, runs=True)
        executor.buffers.before(step)
        micro_step = _MicroStep(executor, step, after, closing, meeting)
        try:
            result = micro_step.run(self._function, args, kwargs, self._globals)
        finally:
            step.forget_gradients()
            executor.accumulators.toggled(step.objects.parameters)
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result)


class _MicroStep:
    """What one call adds to the window, and its end where the call is a boundary."""

    def __init__(
        self,
        executor: Executor,
        step: EagerStep,
        after: WindowState,
        closing: frozenset[int],
        meeting: Meeting | None,
    ) -> None:
        self._executor, self._step, self._after = executor, step, after
        self._closing, self._meeting = closing, meeting
        self._added: set[str] = set()
        self._weighed, self._ours = False, 0
        options = executor.options
        alone = not options.accumulates and step.setting.group is None
        inside = all(part.pending for part in executor.window.parts)
        earlier = step.signs if inside else None
        self._call = EagerCall(step, self._closes, self._settle, earlier, alone=alone)

    def _closes(self, number: int) -> bool:
        options = self._executor.options
        if options.reduction == "weighted" and self._call.weight is None:
            return False  # not said yet: the window closes when the step has ended
        if options.manual:
            return True
        return self._step.part_of_optimizer(number) in self._closing

    def run(self, function: Any, args: Any, kwargs: Any, names: dict[str, Any]) -> Any:
        """The user's function, and then what belongs after it."""
        executor, step, call = self._executor, self._step, self._call
        owners = [*step.owners_of_tensors, *containers(args, kwargs)] if call.effects else []
        before = tensors_in_place(owners)
        with (
            answering(call, step.objects.optimizers, step.clearing, names),
            self._own_collectives(function),
            following(call.effects),
        ):
            result = function(*args, **kwargs)
            if call.effects is not None:
                put_back(before, call.effects)
        step.signs = call.effects.signs if call.effects is not None else {}
        call.end(manual=executor.options.manual)
        self._add([n for n in call.terms if n not in self._added])
        if call.stepped:
            step.actions = call.actions
            self._meet()
        if self._meeting is None or not self._closing:
            executor.end_call(self._after)
            return result
        self._check_reached()
        ending = executor.ending(self._meeting, self._after)
        late = [i for i in step.in_turn(self._closing) if i not in call.updated]
        call.updated.update({i: step.settle(ending, i) for i in late})
        step.repeat([i for i in late if call.updated[i]])
        self._end_window()
        step.schedule([i for i, updated in call.updated.items() if updated])
        return result

    def _end_window(self) -> None:
        assert self._meeting is not None
        made = self._call.stepped.intersection(i for i, r in self._call.updated.items() if r)
        updated = {self._step.part_of_optimizer(i) for i in made}
        self._executor.window = self._after
        self._executor.end_window(self._step, self._meeting, Closed(updated=frozenset(updated)))

    def _check_reached(self) -> None:
        reached = {self._step.part_of_optimizer(i) for i in self._call.stepped}
        for part in self._closing:
            if part not in reached:
                raise NoOptimizerError(
                    f"part {part} of the window",
                    seen="it ends with this call, which does not reach its optimizer",
                    wanted="every optimizer reached in every call of the step",
                    fix="call optimizer.step() on every call; when it takes effect is decided for you",
                )

    def _meet(self) -> None:
        """The step itself says, by reaching its optimizer, that the window ends here."""
        if self._meeting is None and self._executor.options.manual:
            self._closing = frozenset(range(len(self._after.parts)))
            self._meeting = self._executor.meet(
                self._step, BOUNDARY, self._closing, self._after, runs=True
            )

    def _settle(self, number: int, held: frozenset[str]) -> bool:
        before = self._started()
        self._meet()
        self._add([n for n in self._call.terms if n in held and n not in self._added])
        assert self._meeting is not None  # an optimizer's window ends, so the ranks have met
        made = self._step.settle(self._executor.ending(self._meeting, self._after), number)
        self._ours += self._started() - before
        return made

    @contextmanager
    def _own_collectives(self, function: Callable[..., Any]) -> Iterator[None]:
        """Whether the step communicates by itself: then ranks have to know of each other's calls."""
        before = self._started()
        yield
        if self._started() - before > self._ours:
            inner: Any = inspect.unwrap(getattr(function, "__func__", function))
            code = getattr(inner, "__code__", None)
            place = f"{code.co_filename}:{code.co_firstlineno}" if code else type(inner).__name__
            self._step.collectives = OwnCollectives.unseen(place)

    def _started(self) -> int:
        group = self._step.setting.group
        return (started_collectives(group) or 0) if group is not None else 0

    def _add(self, names: list[str]) -> None:
        """Terms into the running sums; the weight of the micro-step, once for each part."""
        executor, step, call = self._executor, self._step, self._call
        held, known = executor.accumulators, step.objects.parameters
        weight = self._weight()
        held.make({name: known[name] for name in names}, known, executor.options)
        executor.integrity.writes(updates=False)
        if weight is not None and not self._weighed:
            self._weighed = True
            step.weight = weight
            for total in held.weights.values():
                total.add_(weight)
        for name in names:
            term = call.terms[name]
            total = held.sums[name]
            term = (term.to_dense() if term.is_sparse else term).to(total.dtype)
            if weight is None:
                total.add_(term)
            elif weight:  # a term that does not count may be anything, NaN too
                weighted = executor.options.reduction == "weighted"
                total.add_(term * weight.to(total.dtype) if weighted else term)
        self._added.update(names)
        held.added(names, weighed=weight is not None)
        step.trained |= self._added

    def _weight(self) -> torch.Tensor | None:
        """This call's weight, 0 where something in it is not finite; None where all micro-steps weigh the same."""
        options, call = self._executor.options, self._call
        if not self._step.weighs:
            return None
        weight = torch.ones((), dtype=torch.float64)
        if options.reduction == "weighted":
            if call.weight is None:
                raise CaptureError(
                    'reduction="weighted"',
                    seen="the step does not say its weight",
                    wanted="one call of gradsync_fx.micro_batch_weight(w) in the step",
                    fix="call it with the number of tokens (or samples), in every branch of the step",
                )
            weight = call.weight.reshape(())
        if options.skip_nonfinite:
            values = [*call.terms.values(), *call.losses, weight]
            if not all(bool(v.isfinite().all()) for v in values):
                return torch.zeros((), dtype=torch.float64)
        return weight
