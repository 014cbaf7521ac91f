"""`EagerCall`: one call of a step that runs eagerly, and its gradients, one optimizer after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.amp import GradScaler
from torch.nn.utils import clip_grad
from torch.optim import Optimizer

from gradsync_fx import scaling
from gradsync_fx._torch import tree_map_only
from gradsync_fx.capture.tracer import no_optimizer_error
from gradsync_fx.eager.actions import Action, Clipping, OptimizerStep, Schedule, needed
from gradsync_fx.eager.effects import Effects, Signs
from gradsync_fx.eager.step import EagerStep
from gradsync_fx.errors import CaptureError, ReadBeforeBoundaryError
from gradsync_fx.optim import zeroing
from gradsync_fx.optim.opaque import closure_given
from gradsync_fx.planning.setting import unmapped
from gradsync_fx.user_lines import user_line, warn_user


Settle = Callable[[int, frozenset[str]], bool]


class EagerCall:
    """CallAnswers the calls of patches.py.

    closes: whether the window of a part ends with this call. settle: reduces what the window summed for the
    parameters of one optimizer (its number, and their names); says whether there was anything. earlier: `signs` of
    the window's call before, if there was one.
    """

    def __init__(
        self,
        step: EagerStep,
        closes: Callable[[int], bool],
        settle: Settle,
        earlier: Signs | None,
        *,
        alone: bool,
    ) -> None:
        self._step, self.closes, self._settle = step, closes, settle
        self._may_change = alone
        # Where each call is an update of its own, or the step itself says when, its effects are as they stand.
        as_they_stand = alone or step.options.manual
        self.effects = None if as_they_stand else Effects(step, self, earlier)
        self.actions: list[Action] = []
        self.terms: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self.losses: list[torch.Tensor] = []
        self.weight: torch.Tensor | None = None
        self.updated: dict[int, bool] = {}
        self._as_given: dict[str, tuple[torch.Tensor, int]] = {}
        self._norm: tuple[Any, ...] = ()
        self._norm_slot = 0
        self._looked: set[int] = set()

    def paused(self) -> AbstractContextManager[None]:
        """An answer is made inside: what torch does for it is no effect of the step's own code."""
        return self.effects.paused() if self.effects is not None else nullcontext()

    @property
    def stepped(self) -> set[int]:
        """The optimizers whose `step` was called."""
        return {
            i for action in self.actions if isinstance(action, OptimizerStep) for i in action.reads
        }

    def backward(self, run: Callable[[], None], losses: Any) -> None:
        """`torch.autograd.backward`."""
        for number in (*self.updated, *self._looked):
            if number not in self.stepped:
                raise _read_early(self._step, number)
        for name, term in self.terms.items():
            # Taken by the window: what comes now is another gradient, which may or may not be used.
            parameter = self._step.objects.parameters[name]
            if parameter.grad is term:
                parameter.grad = None
        run()
        self.losses += [losses] if isinstance(losses, torch.Tensor) else list(losses)
        for name, parameter in self._step.objects.parameters.items():
            if parameter.grad is not None:
                self._as_given[name] = (parameter.grad, parameter.grad._version)

    def norm(self, held: list[torch.Tensor], run: Callable[[Any], Any], how: Any) -> Any:
        """The norm inside `clip_grad_norm_`: of the window's gradient, and NaN where there is none yet."""
        names = [self._step.name_of[id(p)] for p in held if id(p) in self._step.name_of]
        self._norm = how
        owners = self._owners(names)
        if self._reach(owners):
            found = run([p.grad for p in held if p.grad is not None])
            self._step.norms.append(found)
        else:
            found = torch.full((), torch.nan, dtype=held[0].dtype, device=held[0].device)
        if self.effects is not None:
            self._norm_slot = self.effects.new_slot()
            self.effects.norm(found, owners, self._norm_slot)
        return found

    def clip(self, function: Any, parameters: Any, run: Callable[[], Any], how: Any) -> None:
        """The scaling inside `clip_grad_norm_`, and `clip_grad_value_`."""
        held = (parameters,) if isinstance(parameters, torch.Tensor) else tuple(parameters)
        names = [self._step.name_of[id(p)] for p in held if id(p) in self._step.name_of]
        if function is clip_grad.clip_grad_norm_:
            keys = ("norm_type", "error_if_nonfinite", "foreach")
            how = {**how, **dict(zip(keys, self._norm, strict=False))}
        owners = self._owners(names)
        if self.effects is not None:
            self.effects.check_clipping(held, how)
        self.actions.append(Clipping(owners, function, held, tuple(how.items()), self._norm_slot))
        if self._reach(owners):
            run()

    def update(self, optimizer: Optimizer, run: Any, closure: Any, args: Any, kwargs: Any) -> Any:
        """`optimizer.step()`."""
        if closure is not None:
            raise closure_given(optimizer)
        number = self._step.number_of(optimizer)
        if self._step.part_of_optimizer(number) < 0:
            raise unmapped(type(optimizer).__name__, "the step calls it, and no k is given for it")
        if number in self.stepped:
            raise CaptureError(
                f"{type(optimizer).__name__}.step",
                seen="it is called more than once in a step",
                wanted="one update of a parameter in a call",
                fix="make each update a step of its own: gradsync_fx.optimize(one_update, ...)",
            )
        reached = self._reach((number,))
        given = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), dict(kwargs)))
        self.actions.append(OptimizerStep((number,), optimizer, given[0], tuple(given[1].items())))
        return run() if reached and self.updated[number] else None

    def schedule(self, scheduler: Any, args: Any, kwargs: Any) -> None:
        """`scheduler.step()`: when the step has ended, and only after an update."""
        self._behind(scheduler, getattr(scheduler, "optimizer", None), "step", args, kwargs)

    def zero(self, owner: Any, method: Any, run: Any, args: Any, kwargs: Any) -> None:
        """A `zero_grad` of the user's own: what it does beside torch's belongs to the update."""
        if self.effects is None:
            run()
            return
        why_not = zeroing.why_not_later(owner, method)
        if why_not is not None:
            raise why_not
        optimizer = owner if isinstance(owner, Optimizer) else None
        self._behind(owner, optimizer, zeroing.NAME, args, kwargs)

    def _behind(self, owner: Any, optimizer: Any, method: str, args: Any, kwargs: Any) -> None:
        reads = (self._step.number_of(optimizer),) if optimizer is not None else ()
        given = tree_map_only(torch.Tensor, torch.Tensor.detach, (tuple(args), dict(kwargs)))
        self.actions.append(Schedule(reads, owner, given[0], tuple(given[1].items()), method))

    def weigh(self, weight: Any) -> None:
        """`micro_batch_weight`."""
        reduction = self._step.options.reduction
        if reduction != "weighted" and not self._step.actions:
            warn_user(f'micro_batch_weight has no effect with reduction="{reduction}"')
        if self.weight is not None:
            raise CaptureError(
                f"micro_batch_weight, at {user_line()}",
                seen="it is called twice in one call of the step",
                wanted="one call, with the weight of the whole micro-batch",
                fix="add the weights up first",
            )
        self.weight = torch.as_tensor(weight, dtype=torch.float64).detach().cpu()
        if self.weight.numel() != 1:
            raise CaptureError(
                f"micro_batch_weight, at {user_line()}",
                seen=f"a tensor of shape {tuple(self.weight.shape)}",
                wanted="one number for the micro-batch",
                fix="pass the sum, or the number of tokens",
            )

    def scaler(self, scaler: GradScaler, name: str) -> None:
        """A `GradScaler`'s methods."""
        if scaler.is_enabled():
            raise scaling.refused(f"{type(scaler).__name__}.{name}")

    def look(self, number: int) -> None:
        """The step's own code looks at gradients of an optimizer: they are terms of the window, or the window's."""
        if number not in self.updated:
            self._looked.add(number)
        self._reach((number,))

    def end(self, *, manual: bool) -> None:
        """What is left in `.grad`: terms where the step itself decides about windows, else an optimizer's that was
        not reached."""
        if manual and not self.stepped:
            self._take(self._step.objects.parameters)
        elif not self.stepped:
            raise no_optimizer_error()
        reduced = {name for number in self.updated for name in self._step.held_by(number)}
        for name, term in self.terms.items():
            followed = self.effects is not None and not term.is_sparse
            if term._version != self._versions[name] and name not in reduced and not followed:
                raise _changed(name)
        self.actions = needed(self.actions)

    def _owners(self, names: Iterable[str]) -> tuple[int, ...]:
        owner = self._step.owners()
        return tuple(dict.fromkeys(owner[name] for name in names if name in owner))

    def _reach(self, owners: tuple[int, ...]) -> bool:
        """These optimizers' gradients are looked at: they become the window's, where it ends with this call."""
        parts = {self._step.part_of_optimizer(number) for number in owners}
        if len(parts) > 1 and self._step.options.several_windows:
            raise _entangled(sorted(self._step.held_by(owners[-1]))[0])
        for number in owners:
            if number in self.updated:
                continue
            held = self._step.held_by(number)
            self._take(name for name in self._step.objects.parameters if name in held)
            if self.closes(number):
                self.updated[number] = self._settle(number, held)
        return all(number in self.updated for number in owners)

    def _take(self, names: Iterable[str]) -> None:
        """Gradients of this micro-step become terms of the window."""
        for name in names:
            gradient = self._step.objects.parameters[name].grad
            if gradient is not None and name not in self.terms:
                given = self._as_given.get(name, (None, 0))
                same = given[0] is gradient and given[1] == gradient._version
                followed = self.effects is not None and not gradient.is_sparse
                if not same and not self._may_change and not followed:
                    raise _changed(name)
                self.terms[name], self._versions[name] = gradient, gradient._version


def _changed(name: str) -> CaptureError:
    return CaptureError(
        f"gradient of {name!r}",
        seen="the step changes it by its own code between backward and its end, and runs eagerly",
        wanted="gradients that only backward, clip_grad_norm_ and clip_grad_value_ change: on a call that does not end "
        "a window they are this micro-step's alone",
        fix="use torch's clipping, or mend the step so that it can be captured: then such code runs at the boundary",
    )


def _entangled(name: str) -> CaptureError:
    return CaptureError(
        f"clipping, at {user_line()}",
        seen=f"it reads the gradient of {name!r}, which belongs to an optimizer with a window of its own",
        wanted="optimizers whose gradients do not meet (in one clipping, say) when each has its own k",
        fix="clip each optimizer's parameters apart, or give them one k",
    )


def _read_early(step: EagerStep, number: int) -> ReadBeforeBoundaryError:
    name = sorted(step.held_by(number))[0]
    return ReadBeforeBoundaryError(
        f"synced gradient of {name!r}",
        seen="backward is called again between the clipping of gradients and the update",
        wanted="all calls of backward before the first look at a gradient",
        fix="clip after the last backward",
    )
