"""The update of a class that is not torch's own, compared with its real `step()` before it is used: on copies.

Both start from the optimizer as it is, with made-up gradients. A trace that computes something else than the code that
it was taken from is not used.
"""

from __future__ import annotations

import copy
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule
from torch.optim import Optimizer

from gradsync_fx.optim.reached import is_constant
from gradsync_fx.optim.state import REAL, State, parameters_of
from gradsync_fx.optim.subgraphs import Body
from gradsync_fx.optim.update import Update


log = logging.getLogger(__name__)


def difference(update: Update, state: dict[int, State]) -> str:
    """What the traced update computes otherwise than `step()`, for people; "" where they agree.

    state: by position, what the trace started from.
    """
    optimizer = update.optimizer
    flat = parameters_of(optimizer)
    if any(type(p) not in REAL or p.device.type == "meta" for p in flat):
        return ""
    if not _room(flat, optimizer):
        log.info(
            "%s: no memory to compare its traced update with its step", type(optimizer).__name__
        )
        return ""
    gradients = _gradients(update, flat)
    theirs, stand_ins = _copy(optimizer, flat, state)
    for i, gradient in gradients.items():
        stand_ins[i].grad = gradient.clone()
    type(optimizer).step(theirs)
    for what, ours, start in _traced(update, state, flat, gradients):
        where, i, key = what
        if where == "parameter":
            other: Any = stand_ins[i].detach()
        else:
            owner = theirs.param_groups[i] if where == "group" else theirs.state[stand_ins[i]]
            other = owner.get(key)
        if not _alike(ours, other, start):
            name = "parameters" if where == "parameter" else f"{key!r} of its {where}"
            return f"its traced update gives other {name} than its step()"
    return ""


def _room(flat: list[torch.Tensor], optimizer: Optimizer) -> bool:
    """Whether there is memory for two copies of parameters, gradients and state."""
    held = [v for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor)]
    needed = 3 * sum(t.numel() * t.element_size() for t in (*flat, *flat, *held))
    if flat and flat[0].device.type == "cuda":
        return needed < int(torch.cuda.mem_get_info(flat[0].device)[0])
    return needed < os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _gradients(update: Update, flat: list[torch.Tensor]) -> dict[int, torch.Tensor]:
    source = torch.Generator().manual_seed(0)
    found = {}
    for i in update.which:
        found[i] = torch.empty_like(flat[i], requires_grad=False)
        found[i].copy_(torch.randn(flat[i].shape, generator=source))
    return found


def _copy(
    optimizer: Optimizer, flat: list[torch.Tensor], state: dict[int, State]
) -> tuple[Any, list[Any]]:
    """An optimizer of the same class over copies of its parameters, which come second.

    state: in place of what it holds for these positions (where other ranks hold some of that).
    """
    stand_ins: dict[int, Any] = {}
    for p in flat:
        stand_ins[id(p)] = torch.nn.Parameter(p.detach().clone(), requires_grad=p.requires_grad)
        vars(stand_ins[id(p)]).update(copy.deepcopy(_constants(vars(p))))
    theirs = object.__new__(type(optimizer))
    held = vars(theirs)
    held.update({k: _copied(v) for k, v in vars(optimizer).items() if k != "step"})
    held["param_groups"] = [
        {
            k: [stand_ins[id(p)] for p in v] if k == "params" else _copied(v)
            for k, v in group.items()
        }
        for group in optimizer.param_groups
    ]
    entries = {
        stand_ins[id(p)]: {k: _copied(v) for k, v in state.get(i, optimizer.state[p]).items()}
        for i, p in enumerate(flat)
        if optimizer.state.get(p)
    }
    held["state"] = defaultdict(dict, entries)
    return theirs, [stand_ins[id(p)] for p in flat]


def _constants(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if is_constant(value)}


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.deepcopy(value) if is_constant(value) else value


def _traced(
    update: Update,
    state: dict[int, State],
    flat: list[torch.Tensor],
    gradients: dict[int, torch.Tensor],
) -> Iterator[tuple[tuple[str, int, Any], Any, Any]]:
    """What the trace computes: each value's position, the value, and what was there before."""
    numbers = update.read_numbers(state)
    assert numbers is not None
    values = update.host(*numbers)
    scalars = [torch.tensor(float(v), dtype=torch.float64) for v in values[: update.scalar_count]]
    groups = update.optimizer.param_groups

    def at(place: tuple[str, int, Any]) -> Any:
        where, i, key = place
        return (groups[i] if where == "group" else state.get(i, {})).get(key)

    runs: dict[Body, Any] = {}
    for call in update.calls:
        if call.body not in runs:
            runs[call.body] = GraphModule(dict(call.body.tensors), call.body.graph)
        with torch.no_grad():
            results = runs[call.body](
                *(flat[i].detach() for i in call.params),
                *(gradients[i] for i in call.params),
                *(at(update.states[i]).detach() for i in call.states),
                *(scalars[i] for i in call.scalars),
            )
        for i, value in zip(call.params, results, strict=False):
            yield ("parameter", i, None), value, flat[i].detach()
        for place, value in zip(call.written, results[len(call.params) :], strict=True):
            yield place, value, at(place)
    for places, value in zip(update.number_out, values[update.scalar_count :], strict=True):
        for place in places:
            yield place, value, at(place)


def _alike(ours: Any, theirs: Any, start: Any) -> bool:
    """Within the tolerance of `self_check`: relative to how far a value moved, and rounding of its size."""
    if theirs is None:
        return False
    a, b = (torch.as_tensor(v).detach().double() for v in (ours, theirs))
    if a.shape != b.shape:
        return False
    eps = torch.finfo(theirs.dtype).eps if _floats(theirs) else torch.finfo(torch.float32).eps
    moved = b if start is None else b - torch.as_tensor(start).detach().double()
    allowed = eps**0.5 * _largest(moved) + 2 * eps * _largest(b)
    apart = (a - b).abs()[~((a == b) | (a.isnan() & b.isnan()))]
    return not apart.numel() or bool(apart.max() <= allowed)


def _floats(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _largest(values: torch.Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0
