"""`self_check`: runs one window both ways on copies of the user's objects, and compares the results.

The reference is `reference_window`: the user's function in plain eager PyTorch, which shares no code with the runtime.
It runs twice, the second time from parameters that differ in their last bit: what that changes is rounding, whatever
the model makes of it, and is allowed for. The rest of a tolerance is relative to how far a value moved in the window,
not to its size: an update that is wrong by a tenth is found at any learning rate.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist

from gradsync_fx._torch import tree_leaves, tree_map_only
from gradsync_fx.checking import copies, reference_window
from gradsync_fx.checking.copies import Copy, copied
from gradsync_fx.checking.reference_window import Arguments, same_random_numbers
from gradsync_fx.errors import VerificationError, WindowError
from gradsync_fx.options import Options
from gradsync_fx.planning.setting import find_setting
from gradsync_fx.runtime.sharing import is_divided, whole_state
from gradsync_fx.wording import number_of


SHOWN = 10  # values that a verdict lists at most


@dataclass(frozen=True, slots=True)
class Compared:
    """One value after a window. what: "parameter", "buffer", "output" or "optimizer state".

    difference: between both ways, NaN where only one has a value. allowed: the tolerance. moved: how far the reference
    went in the window; for outputs and optimizer state, how large it is. All three are of the largest element, or where
    that is equal and all elements together are not, the root of their mean square.
    """

    what: str
    name: str
    difference: float
    allowed: float
    moved: float

    @property
    def equal(self) -> bool:
        return self.difference <= self.allowed

    def __str__(self) -> str:
        figures = (
            f"differs by {self.difference:.3g}, allowed {self.allowed:.3g}, moved {self.moved:.3g}"
        )
        return f"{self.what} {self.name}: {figures}"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `step.self_check` found.

    values: all that was compared on this rank. ranks_apart: the ranks on which any differs. warnings: of what both ways
    do alike, and is probably not meant: a loss divided by k, say.
    """

    step: str
    micro_steps: int
    world_size: int
    values: tuple[Compared, ...]
    ranks_apart: tuple[int, ...]
    warnings: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every value on every rank agrees within its tolerance."""
        return not self.ranks_apart

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        said = "equal" if self.equal else f"NOT equal, on ranks {list(self.ranks_apart)}"
        lines = [
            f"{self.step}: one window of {number_of(self.micro_steps, 'micro-step')} on "
            f"{number_of(self.world_size, 'rank')}, captured and in "
            f"plain eager PyTorch: {said}"
        ]
        for what in dict.fromkeys(value.what for value in self.values):
            mine = [value for value in self.values if value.what == what]
            apart = [value for value in mine if not value.equal]
            lines.append(f"  {what}: {len(mine) - len(apart)} of {len(mine)} equal")
            shown = apart[:SHOWN] or [max(mine, key=lambda v: v.difference / (v.allowed or 1.0))]
            lines += [f"    {'' if apart else 'largest: '}{value}" for value in shown]
            if len(apart) > SHOWN:
                lines.append(f"    and {len(apart) - SHOWN} more")
        lines += [f"  warning: {text}" for text in self.warnings]
        return "\n".join(lines)

    def require(self) -> None:
        """Raises `VerificationError` unless equal."""
        if not self.equal:
            raise VerificationError(
                f"self_check of {self.step}",
                seen=str(self),
                wanted="the parameters, buffers, outputs and optimizer state of plain eager accumulation",
                fix="report it with this text; until it is mended, accumulate eagerly",
            )


def check(
    function: Callable[..., Any],
    args: Any,
    kwargs: Any,
    options: Options,
    optimized: Any,
    mistakes: Callable[[Any], tuple[str, ...]],
    rtol: float | None = None,
) -> Verdict:
    """Both ways, on copies; the function, its arguments, random numbers and windows stay as they were.

    optimized: the class of optimized steps, made of (function, options). mistakes: what such a step, once called, has
    to say of what is probably not meant. rtol: of what a value moved; by default the
    root of the coarsest precision at work. Every rank calls it. Raises `WindowError` for a step whose windows have no
    one length, or that cannot be copied.
    """
    k = options.gradient_accumulation_steps
    if not isinstance(k, int):
        raise WindowError(
            "self_check",
            seen=f"gradient_accumulation_steps={k!r}",
            wanted="one number of micro-steps",
            fix="check the step with a number, in an optimized step of its own",
        )
    with warnings.catch_warnings():
        # The step itself gives its warnings; a copied optimizer lacks the counter that a scheduler put around `step`.
        warnings.simplefilter("ignore")
        with same_random_numbers():
            state = torch.get_rng_state()
            plain = _Window(_copied(function, args, kwargs, optimized), k)
            plain.results = reference_window.run(plain.copy, plain.calls, options, (optimized,))
            draws = not torch.equal(state, torch.get_rng_state())
        with same_random_numbers():
            rounded = _Window(_copied(function, args, kwargs, optimized), k)
            rounded.disturb()
            rounded.results = reference_window.run(
                rounded.copy, rounded.calls, options, (optimized,)
            )
        with same_random_numbers():
            ours = _Window(_copied(function, args, kwargs, optimized), k)
            step = optimized(ours.copy.function, _unchecked(options, draws))
            try:
                ours.results = [_kept(step(*a, **n)) for a, n in ours.calls]
                said = mistakes(step)
            finally:
                step.discard()  # after an error: no warning of a copy's open window
    values = tuple(_compared(ours, plain, rounded, _precision(options), rtol))
    setting = find_setting(plain.copy, options)
    apart = torch.zeros(setting.world)
    apart[setting.rank] = not all(value.equal for value in values)
    if setting.group is not None:
        apart = apart.to(next(iter(plain.copy.parameters.values())).device)
        dist.all_reduce(apart, group=setting.group)
    ranks = tuple(rank for rank, flag in enumerate(apart.tolist()) if flag)
    name = getattr(function, "__name__", type(function).__name__)
    return Verdict(name, k, setting.world, values, ranks, said)


def _copied(function: Callable[..., Any], args: Any, kwargs: Any, optimized: Any) -> Copy:
    """Copies of all of it, with whole optimizer states: where ranks hold parts, these are gathered."""
    made = copied(function, args, kwargs, (optimized,))
    originals = copies.of(function, args, kwargs).optimizers
    for original, mine in zip(originals, made.optimizers, strict=True):
        if is_divided(original):
            mine.load_state_dict(deepcopy(original.state_dict()))
    return made


def _unchecked(options: Options, draws: bool) -> Options:
    """The same options for the copies, whose updates all count.

    Inductor draws random numbers of its own unless told to draw eager's.
    """
    more = dict(options.options or {})
    if draws and options.backend == "inductor":
        more["fallback_random"] = True
    return replace(options, self_check=False, commit=None, on_update=None, options=more or None)


def _precision(options: Options) -> float:
    given = (options.accumulator_dtype, options.reduce_dtype)
    return max((torch.finfo(dtype).eps for dtype in given if dtype is not None), default=0.0)


class _Window:
    """One of the ways: a copy of the step, the arguments of its calls, and values by kind and name."""

    def __init__(self, copy: Copy, k: int) -> None:
        self.copy = copy
        self.calls = [_varied(copy.args, copy.kwargs, i) for i in range(k)]
        self.before = self._tensors()
        self.results: list[Any] = []

    def _tensors(self) -> dict[tuple[str, str], torch.Tensor]:
        named = (("parameter", self.copy.parameters), ("buffer", self.copy.buffers))
        return {(what, n): t.detach().clone() for what, ts in named for n, t in ts.items()}

    def disturb(self) -> None:
        """Each parameter gets other last bits; the same on every rank."""
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for p in self.copy.parameters.values():
                if _is_inexact(p):
                    sign = torch.randint(0, 2, p.shape, generator=source).to(p) * 2 - 1
                    p.addcmul_(p, sign, value=torch.finfo(p.dtype).eps)
        self.before = self._tensors()

    def values(self) -> dict[tuple[str, str], torch.Tensor]:
        """All that a window leaves, in float64 or complex128."""
        found = dict(self._tensors())
        for i, result in enumerate(self.results):
            for j, leaf in enumerate(tree_leaves(result)):
                if isinstance(leaf, float) or (
                    isinstance(leaf, torch.Tensor) and _is_inexact(leaf)
                ):
                    place = f"{j} of micro-step {i + 1}"
                    found["output", place] = torch.as_tensor(leaf).detach()
        names = {id(p): name for name, p in self.copy.parameters.items()}
        for i, optimizer in enumerate(self.copy.optimizers):
            label = f"{type(optimizer).__name__} {i}"
            held = (
                whole_state(optimizer) if is_divided(optimizer) else getattr(optimizer, "state", {})
            )
            for p, state in held.items():
                name = names.get(id(p), "?") if isinstance(p, torch.Tensor) else str(p)
                for key, value in state.items() if isinstance(state, dict) else [("", state)]:
                    _note(found, f"{label} {name}.{key}", value)
            for key, value in vars(optimizer).items():
                _note(found, f"{label} {key}", value)
            for number, group in enumerate(getattr(optimizer, "param_groups", ())):
                for key, value in group.items():
                    if key != "params":
                        _note(found, f"{label} group {number} {key}", value)
        return {key: _exact(value) for key, value in found.items()}

    def moved(self, key: tuple[str, str], value: torch.Tensor) -> torch.Tensor:
        """How far it went; a value that the window made went from 0."""
        return value - _exact(self.before[key]) if key in self.before else value


def _note(found: dict[tuple[str, str], torch.Tensor], name: str, value: Any) -> None:
    if isinstance(value, torch.Tensor | int | float) and not isinstance(value, bool):
        found["optimizer state", name] = torch.as_tensor(value).detach()


def _kept(result: Any) -> Any:
    return tree_map_only(torch.Tensor, torch.Tensor.clone, result)


def _varied(args: Any, kwargs: Any, number: int) -> Arguments:
    """Arguments whose micro-batch differs from the other calls': its first `number` rows are copies of the next one.

    Rows of all tensors alike, so that they still belong together; tensors that are trained stay as they are.
    """

    def rows(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.requires_grad or tensor.dim() == 0 or tensor.shape[0] < 2:
            return tensor
        count = tensor.shape[0]
        taken = torch.arange(count, device=tensor.device).clamp(min=number % count)
        return tensor[taken]

    varied: Arguments = tree_map_only(torch.Tensor, rows, (args, kwargs))
    return varied


def _compared(
    ours: _Window, plain: _Window, rounded: _Window, precision: float, rtol: float | None
) -> Iterator[Compared]:
    mine, reference, disturbed = ours.values(), plain.values(), rounded.values()
    last = f"of micro-step {len(ours.calls)}"
    for key in dict.fromkeys([*reference, *mine]):
        what, name = key
        if key not in mine or key not in reference or mine[key].shape != reference[key].shape:
            yield Compared(what, name, math.nan, 0.0, math.nan)
            continue
        a, b = mine[key], reference[key]
        if what == "output" and not name.endswith(last):
            # What an accumulate call cannot know (the norm of the window's gradient) it gives as NaN.
            a = torch.where(a.isnan(), b, a)
        moved = plain.moved(key, b)
        other = rounded.moved(key, disturbed[key]) if key in disturbed else moved
        eps = max(_eps(plain, key), precision)
        share = eps**0.5 if rtol is None else rtol
        # One element may be an outlier: the sign of a gradient that is nearly 0, in Adam's first update. Many may not.
        for size, times in ((_typical, 8), (_largest, 64)):
            allowed = share * size(moved)
            allowed += times * size(other - moved) + 2 * _eps(plain, key) * size(b)
            found = Compared(what, name, _difference(a, b, size), allowed, size(moved))
            if not found.equal:
                break
        yield found


def _eps(window: _Window, key: tuple[str, str]) -> float:
    """Of the value's own dtype; of the coarsest parameter's for what is computed from parameters."""
    tensor = window.before.get(key)
    dtypes = [tensor] if tensor is not None else list(window.copy.parameters.values())
    return max((torch.finfo(t.dtype).eps for t in dtypes if _is_inexact(t)), default=0.0)


def _is_inexact(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _exact(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _difference(a: torch.Tensor, b: torch.Tensor, size: Callable[[torch.Tensor], float]) -> float:
    """Of all elements together, NaN where one of them is or where only one of both is infinite."""
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)
    return size(apart) if bool(apart.isfinite().all()) else math.nan


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _typical(values: torch.Tensor) -> float:
    """The root of the mean square."""
    finite = values[values.isfinite()]
    return float(finite.abs().square().mean().sqrt()) if finite.numel() else 0.0
