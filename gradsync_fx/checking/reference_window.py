"""One window in plain eager PyTorch: what a captured step is compared with. Nothing of the runtime is used here.

Every call of the window runs the user's function as it is, with three exceptions: `optimizer.step()` and
`scheduler.step()` do nothing, and what each `backward` adds to `.grad` is noted. The last call runs a second time, now
with both in force, and each `backward` adds what the same one added in the whole window on all ranks:

    sum over calls and ranks of w g / sum over calls and ranks of w       w = 1 except with reduction="weighted"
    sum over calls and ranks of g / ranks                                 with reduction="sum"

Clipping, zeroing and whatever else the function does with gradients is thus the user's own code, run by torch.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync_fx.capture.markers import TRACED
from gradsync_fx.checking.copies import Copy, copied
from gradsync_fx.errors import WindowError
from gradsync_fx.optim.zeroing import NAME, is_own, method_of
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import Setting, find_setting
from gradsync_fx.threads import EAGER_CALLS, in_this_thread


Gradients = list[torch.Tensor | None]  # one for each parameter
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(slots=True)
class Noted:
    """What one call of the function showed. added: for each `backward`, what it added to each parameter's `.grad`."""

    added: list[Gradients] = field(default_factory=list)
    finite: bool = True
    weight: float = 1.0
    at_step: Gradients | None = None


def run(
    step: Copy, window: Sequence[Arguments], options: Options, without: Iterable[type]
) -> list[Any]:
    """Calls the step with each of the arguments, and changes what it holds; returns what the calls returned.

    without: as in `copied`. Raises `WindowError` for a step that makes no call of backward.
    """
    setting = find_setting(step, options)
    group = setting.group
    if group is not None and setting.broadcast_buffers != "never":
        _from_rank_0(setting)
    results, notes = [], []
    for args, kwargs in window[:-1]:
        results.append(_call(step, args, kwargs, note := Noted(), None))
        notes.append(note)
        if group is not None and setting.broadcast_buffers == "every":
            _from_rank_0(setting)
    args, kwargs = window[-1]
    rehearsal = copied(step.function, args, kwargs, without)
    with same_random_numbers():
        _call(rehearsal, rehearsal.args, rehearsal.kwargs, last := Noted(), None)
    totals = _totals(step, setting, [*notes, last], options)
    results.append(_call(step, args, kwargs, Noted(), totals))
    for parameter in step.parameters.values():
        parameter.grad = None
    return results


def _from_rank_0(setting: Setting) -> None:
    assert setting.group is not None
    for buffer in setting.shared_buffers.values():
        dist.broadcast(buffer, dist.get_global_rank(setting.group, 0), group=setting.group)


def _call(step: Copy, args: Any, kwargs: Any, noted: Noted, totals: list[Gradients] | None) -> Any:
    """totals: for each `backward`, what it adds in place of this call's gradients; then updates are in force."""
    parameters = list(step.parameters.values())
    for parameter in parameters:
        parameter.grad = None
    plain_backward = torch.autograd.backward

    def backward(losses: Any, *more: Any, **named: Any) -> None:
        _refuse_originals(losses, step)
        before = [p.grad for p in parameters]
        for p in parameters:
            p.grad = None
        plain_backward(losses, *more, **named)
        added: Gradients = [p.grad for p in parameters]
        held = [losses] if isinstance(losses, torch.Tensor) else list(losses)
        values = [v for v in (*held, *added) if v is not None]
        noted.finite &= all(bool(v.isfinite().all()) for v in values)
        noted.added.append([None if g is None else g.detach().clone() for g in added])
        if totals is not None:
            added = totals[len(noted.added) - 1]
        for p, old, new in zip(parameters, before, added, strict=True):
            p.grad = old if new is None else new.clone() if old is None else old + new

    def weigh(self: Any, weight: Any) -> None:
        noted.weight = float(weight)

    def no_step(*args: Any, **kwargs: Any) -> None:
        if noted.at_step is None:
            noted.at_step = [None if p.grad is None else p.grad.clone() for p in parameters]

    def no_gradients(*args: Any, **kwargs: Any) -> None:
        for p in parameters:
            p.grad = None

    with EAGER_CALLS.held(), ExitStack() as stack:
        enter = stack.enter_context
        enter(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        patches: list[tuple[Any, str, Any]] = [
            (torch.autograd, "backward", backward),
            (type(TRACED), "weigh", weigh),
            (DistributedDataParallel, "forward", _inner),
        ]
        if totals is None:
            for cls in (*_with_step(Optimizer), *_with_step(LRScheduler)):
                patches.append((cls, "step", no_step))
            for one in (*step.optimizers, *step.clearing):
                if is_own(method_of(one)):  # once per update, then
                    patches.append((one, NAME, no_gradients))
        for owner, name, new in patches:
            enter(mock.patch.object(owner, name, in_this_thread(new, getattr(owner, name))))
        return step.function(*args, **kwargs)


def _refuse_originals(losses: Any, step: Copy) -> None:
    """Raises `WindowError` where gradients would go to a parameter that is none of the copies: the user's own."""
    known = {id(p) for p in step.parameters.values()}
    held = [losses] if isinstance(losses, torch.Tensor) else list(losses)
    stack = [loss.grad_fn for loss in held if loss.grad_fn is not None]
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack.extend(below for below, _ in node.next_functions if below is not None)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.nn.Parameter) and id(leaf) not in known:
            raise WindowError(
                "self_check",
                seen=f"the step trains a parameter of shape {tuple(leaf.shape)} that it was not found to touch: a copy "
                "of the step would train the original",
                wanted="parameters that arguments, closures, or globals of the step's own functions lead to",
                fix="pass model and optimizer to the step as arguments",
            )


def _inner(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


def _with_step(cls: type) -> list[type]:
    mine = [cls] if "step" in vars(cls) else []
    below: list[type] = cls.__subclasses__()
    return mine + [c for inner in below for c in _with_step(inner)]


def _totals(
    step: Copy, setting: Setting, notes: list[Noted], options: Options
) -> list[Gradients] | None:
    """What each `backward` of a call adds for the whole window; None where its terms weigh nothing.

    Summed in float64, and rounded once, to the parameter's dtype.
    """
    if not any(note.added for note in notes):
        raise WindowError(
            "self_check",
            seen="the step never calls backward",
            wanted="gradients that backward computes",
            fix="compare such a step by hand",
        )
    ranks = _Ranks(setting.group, next(iter(step.parameters.values())).device)
    weights = [note.weight if options.reduction == "weighted" else 1.0 for note in notes]
    if options.skip_nonfinite:
        weights = [w if note.finite else 0.0 for w, note in zip(weights, notes, strict=True)]
    total = ranks.sum_of(sum(weights))
    if total == 0:
        return None
    by_hand = ranks.reduced_by_hand(notes[-1])
    found: list[Gradients] = []
    for number in range(int(ranks.most(max(len(note.added) for note in notes)))):
        sums: Gradients = []
        for i, (name, parameter) in enumerate(step.parameters.items()):
            exact = torch.complex128 if parameter.is_complex() else torch.float64
            value, terms = torch.zeros_like(parameter, dtype=exact), 0
            for note, weight in zip(notes, weights, strict=True):
                term = note.added[number][i] if number < len(note.added) else None
                if term is not None and weight:
                    value += (term.to_dense() if term.is_sparse else term).to(exact) * weight
                    terms += 1
            alone = by_hand or name in setting.ignored or setting.group is None
            if not alone:
                value, terms = ranks.sum(value), int(ranks.sum_of(terms))
            divisor = total / (setting.world if alone else 1)
            if options.reduction == "sum":
                divisor = 1.0 if alone else float(setting.world)
            sums.append((value / divisor).to(parameter.dtype) if terms else None)
        found.append(sums)
    return found


@dataclass(frozen=True, slots=True)
class _Ranks:
    """Sums over the ranks of a group; of this rank alone where there is none."""

    group: Any
    device: torch.device

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        if self.group is not None:
            dist.all_reduce(value, group=self.group)
        return value

    def sum_of(self, number: float) -> float:
        return float(self.sum(torch.tensor(number, dtype=torch.float64, device=self.device)))

    def most(self, number: float) -> float:
        value = torch.tensor(number, dtype=torch.float64, device=self.device)
        if self.group is not None:
            dist.all_reduce(value, dist.ReduceOp.MAX, group=self.group)
        return float(value)

    def reduced_by_hand(self, note: Noted) -> bool:
        """Whether the step's own code had made gradients equal on all ranks by the time of its update."""
        added = [g for gradients in note.added for g in gradients]
        return self._differ(added) and not self._differ(note.at_step or [])

    def _differ(self, gradients: Gradients) -> bool:
        size = float(sum(g.abs().double().sum() for g in gradients if g is not None))
        return self.most(size) != -self.most(-size)


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """What is drawn inside was not drawn: torch's, Python's and numpy's generators are set back."""
    numpy = sys.modules.get("numpy")
    python, arrays = random.getstate(), numpy.random.get_state() if numpy else None
    with torch.random.fork_rng():
        try:
            yield
        finally:
            random.setstate(python)
            if numpy:
                numpy.random.set_state(arrays)
