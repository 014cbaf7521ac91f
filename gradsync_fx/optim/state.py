"""What an optimizer's state is before its first update, without the user seeing it appear early.

Optimizers create their state inside the first `step()`. A trace of that step would differ from a trace of all later
ones, and cost a second compilation. So the initial state is worked out beforehand and kept apart; it moves into
`optimizer.state` with the first update, as in eager.

torch's own optimizers answer through `_init_group`. For what that leaves open (momentum buffers, any other
`Optimizer` subclass) a guess is made (zeros; counters extrapolated back from two steps) and proved: one eager step of
small stand-ins from the guess must give, bit for bit, what the step from nothing gives. A guess that fails is not
used: the first update is then a program of its own.
"""

from __future__ import annotations

import copy
import inspect
import math
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx.optim.footprint import Footprint
from gradsync_fx.optim.reached import is_constant, is_torchs, of_torch, plain_step


State = dict[str, Any]
REAL = (torch.Tensor, torch.nn.Parameter)


def in_groups(optimizer: Optimizer) -> list[torch.Tensor]:
    """The parameters of its groups, in their order. A wrapper need not have any."""
    return [p for group in getattr(optimizer, "param_groups", ()) for p in group["params"]]


def parameters_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """All parameters that it may update: positions in an update count along this list.

    Those of its groups, and after them what a class that is not torch's own reaches in another way: the parameters of
    the models and optimizers that it holds.
    """
    found = in_groups(optimizer)
    if not is_torchs(optimizer):
        known = set(map(id, found))
        found += [p for i, p in _beside(optimizer).items() if i not in known]
    return found


def _beside(optimizer: Optimizer) -> dict[int, torch.Tensor]:
    found: dict[int, torch.Tensor] = {}
    queue, seen = list(vars(optimizer).values()), {id(optimizer)}
    while queue:
        value = queue.pop(0)
        if id(value) in seen or is_constant(value):
            continue
        seen.add(id(value))
        if isinstance(value, torch.nn.Module):
            found.update({id(p): p for p in value.parameters() if p.requires_grad})
        elif isinstance(value, Optimizer):
            found.update({id(p): p for p in in_groups(value)})
            queue += vars(value).values()
        elif isinstance(value, torch.nn.Parameter):
            found[id(value)] = value
        elif isinstance(value, dict):
            queue += [*value, *value.values()]
        elif isinstance(value, list | tuple | set):
            queue += value
    return found


def initial_state(footprint: Footprint, which: list[int]) -> dict[int, State] | None:
    """State before the first update, for the parameters at positions `which` that have none yet.

    None when no guess could be proved. Nothing of the optimizer changes. Raises `Unseen` where its code does what a
    trace would not see.
    """
    optimizer = footprint.optimizer
    flat = parameters_of(optimizer)
    missing = [i for i in which if not optimizer.state.get(flat[i])]
    if not missing:
        return {}
    created = _from_init_group(footprint, optimizer.param_groups, missing)
    guess = _small_trial(footprint, missing)
    if guess is None:
        return None
    found: dict[int, State] = {}
    for i in missing:
        state = dict(created.get(i, {}))
        for key, value in guess[i].items():
            if key not in state:
                state[key] = _materialise(value, flat[i])
        found[i] = state
    return found


class _ZerosLike:
    """A state entry that starts as zeros of the parameter's shape."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


def _materialise(value: Any, parameter: torch.Tensor) -> Any:
    if isinstance(value, _ZerosLike):
        return torch.zeros_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _from_init_group(
    footprint: Footprint, groups: list[dict[str, Any]], which: list[int]
) -> dict[int, State]:
    init = getattr(type(footprint.optimizer), "_init_group", None)
    init = inspect.unwrap(init) if callable(init) else None
    if init is None or not of_torch(init):
        return {}  # another library's takes what it likes
    lists = len(inspect.signature(init).parameters) - 2
    created: dict[int, State] = {}
    position = 0
    for group in groups:
        here = [i for i in which if position <= i < position + len(group["params"])]
        twins = {i: torch.nn.Parameter(group["params"][i - position].detach()) for i in here}
        for twin in twins.values():
            twin.grad = twin.new_zeros((), requires_grad=False).expand_as(twin)
        trial = footprint.twin([{**group, "params": list(twins.values())}], {})
        init(trial, trial.param_groups[0], *([] for _ in range(lists)))
        for i, twin in twins.items():
            held = trial.state.get(twin, {})
            created[i] = {k: v for k, v in held.items() if v is not None}
        footprint.check(trial)
        position += len(group["params"])
    return created


def _small_trial(footprint: Footprint, which: list[int]) -> dict[int, State] | None:
    """Guesses, proved on stand-ins of at most 4 elements a dimension, one for each kind of parameter."""
    position, owner = 0, {}
    for group in footprint.optimizer.param_groups:
        for p in group["params"]:
            owner[position] = (group, p)
            position += 1
    proved: dict[Any, State] = {}
    result: dict[int, State] = {}
    for i in which:
        group, p = owner[i]
        kind = (id(group), p.dim(), p.dtype, p.device)
        if kind not in proved:
            guess = _prove(footprint, group, p)
            if guess is None:
                return None
            proved[kind] = guess
        result[i] = proved[kind]
    return result


def _prove(footprint: Footprint, group: dict[str, Any], p: torch.Tensor) -> State | None:
    generator = torch.Generator().manual_seed(0)
    shape = [min(n, 4) for n in p.shape]
    # Parameters without storage (meta, fake) are proved on the CPU.
    place = p.device if p.device.type != "meta" and type(p) in REAL else torch.device("cpu")
    start = torch.randn(shape, generator=generator).to(place, p.dtype)
    grads = [torch.randn(shape, generator=generator).to(place, p.dtype) for _ in range(2)]

    def run(state: State, steps: int) -> tuple[torch.Tensor, State, list[State]]:
        twin = torch.nn.Parameter(start.clone())
        initial = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in state.items()}
        footprint.give_attributes(p, twin)
        trial = footprint.twin(
            [{**copy.copy(group), "params": [twin]}], {twin: initial} if initial else {}
        )
        seen = []
        for grad in grads[:steps]:
            twin.grad = grad.clone()
            with torch.no_grad():
                plain_step(footprint.optimizer)(trial)
            footprint.check(trial)
            seen.append({k: _copy(v) for k, v in trial.state.get(twin, {}).items()})
        return twin.detach(), seen[-1], seen

    small = torch.nn.Parameter(start.clone())
    known = _from_init_group(footprint, [{**group, "params": [small]}], [0]).get(0, {})
    _, _, (first, second) = run({}, 2)
    guess: State = {}
    for key, value in first.items():
        if key in known:
            continue
        if isinstance(value, torch.Tensor) and value.shape == start.shape and value.dim() > 0:
            guess[key] = _ZerosLike(value.dtype)
        elif _is_counter(value):
            guess[key] = 2 * value - second[key]
        elif value is not None:
            return None
    from_guess = {**known, **{k: _materialise(v, small) for k, v in guess.items()}}
    want_p, want_s, _ = run({}, 1)
    if not from_guess:
        return guess
    got_p, got_s, _ = run(from_guess, 1)
    same = torch.equal(want_p, got_p) and all(_equal(v, got_s.get(k)) for k, v in want_s.items())
    return guess if same else None


def _is_counter(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=0, abs_tol=0)
    return bool(a == b)
