"""The optimizer's update as a graph, traced apart from the step, from the user's own optimizer code.

A twin of the optimizer runs its `step` once over fake tensors. Everything is an input:

params, grads, state tensors             graph inputs
lr, betas, step counters (Python numbers symbolic: arithmetic on them is cut out of the graph and runs on the host at
and CPU tensors of one element)          each update (the same float64 arithmetic that eager does); the results enter
                                         the program as scalars, so that no schedule ever recompiles anything
everything else (flags, None, strings)   constants; a change of one of them needs a new trace (`Update.fits`)

The same holds for comparisons of the symbolic numbers (`if weight_decay != 0`): they are kept as conditions.

Parameters that are alike (group, form, state) are traced by one or two of them (grouping.py), where the optimizer is
one of torch's own and the trace shows that parameters are updated independently of each other; else all of them are.
Any other optimizer's code may look at names, positions and attributes: its twin holds all parameters, and tells the
footprint what it reads and writes beside the values (footprint.py).
"""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch.optim import Optimizer

from gradsync_fx._torch import (
    ConstantSource,
    DimDynamic,
    FakeTensorMode,
    ShapeEnv,
    make_fx,
)
from gradsync_fx.errors import UpdateError
from gradsync_fx.optim.compiled_mode import as_when_compiled, settle_flavour, without_factors
from gradsync_fx.optim.footprint import Footprint
from gradsync_fx.optim.grouping import (
    Members,
    find_alike,
    for_all_calls,
    for_all_places,
    treated_alike,
)
from gradsync_fx.optim.host_arithmetic import rigid_numbers, split_host
from gradsync_fx.optim.number_tensor import Counter, is_counter, plain
from gradsync_fx.optim.reached import Unseen, plain_step
from gradsync_fx.optim.state import State
from gradsync_fx.optim.subgraphs import Place, split, whole
from gradsync_fx.optim.update import Update, structure_of


def trace_update(
    optimizer: Optimizer,
    which: tuple[int, ...],
    state: dict[int, State],
    decompositions: Any,
    footprint: Footprint | None = None,
) -> Update:
    """Traces `optimizer.step()` for the parameters at positions `which`, all of which have a gradient.

    state: by position, what `optimizer.state` holds or will hold. Raises `UpdateError` when the optimizer's code
    cannot be traced (data-dependent control flow, for instance), and `Unseen` where a trace would miss something.
    """
    footprint = footprint or Footprint(optimizer)
    alike, pairs = find_alike(optimizer, which, state) if footprint.torchs else ({}, [])
    if alike and len(alike) < len(which):
        few = _with_or_without_counters(footprint, tuple(alike), state, decompositions)
        if len(few.calls) == len(alike) and treated_alike(few.calls, pairs):
            return _for_all(few, which, alike, state)
    return _with_or_without_counters(footprint, which, state, decompositions)


def _for_all(
    few: Update, which: tuple[int, ...], alike: dict[int, list[int]], state: dict[int, State]
) -> Update:
    calls, states = for_all_calls(few.calls, few.states, alike)
    return replace(
        few,
        which=which,
        calls=calls,
        states=states,
        numbers=[(for_all_places(places, alike), part) for places, part in few.numbers],
        number_out=[for_all_places(places, alike) for places in few.number_out],
        constants=[
            (place, value) for one, value in few.constants for place in for_all_places([one], alike)
        ],
        structure=structure_of(which, state),
    )


def _with_or_without_counters(footprint: Footprint, *given: Any) -> Update:
    try:
        return _tried(footprint, *given, counters=True)
    except UpdateError:
        # Some optimizers compute tensors from their counters: then counters are tensors of the program.
        return _tried(footprint, *given, counters=False)


def _tried(footprint: Footprint, *given: Any, counters: bool) -> Update:
    """The optimizer's code is anybody's, and so is what it raises on stand-ins."""
    try:
        return _trace(footprint, *given, counters=counters)
    except Unseen:
        raise
    except Exception as failure:
        footprint.raise_kept()
        raise UpdateError(
            f"{type(footprint.optimizer).__name__}.step",
            seen=f"its code cannot be traced ({type(failure).__name__}: {_first_line(failure)})",
            wanted="an update whose control flow does not depend on tensor values",
            fix="use an optimizer that torch.compile can trace",
        ) from failure


def _trace(
    footprint: Footprint,
    which: tuple[int, ...],
    state: dict[int, State],
    decompositions: Any,
    *,
    counters: bool,
    fixed: frozenset[tuple[Place, int | None]] = frozenset(),
) -> Update:
    optimizer = footprint.optimizer
    flat = [(gi, p) for gi, group in enumerate(optimizer.param_groups) for p in group["params"]]
    # Parameters without a gradient: where positions are counted, they count.
    others = [] if footprint.torchs else [i for i in range(len(flat)) if i not in set(which)]
    # Hyper-parameters 0 and 1 are values like any other: no specialisation on them.
    env = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    mode = FakeTensorMode(shape_env=env, allow_non_fake_inputs=True, static_shapes=True)
    carriers: list[Any] = []
    numbers: list[tuple[list[Place], int | None]] = []
    shared: dict[Any, int] = {}
    symbols: list[Any] = []
    constants: list[tuple[Place, Any]] = []
    states: list[Place] = []
    state_fakes: list[Any] = []
    # What has a shape for some parameter is no counter where a parameter is a scalar.
    shaped = {k for i in which for k, v in state.get(i, {}).items() if getattr(v, "ndim", 0)}

    def number(value: int | float, place: Place, part: int | None = None) -> Any:
        if place[0] == "state":
            # The counters of a group's parameters are one number as long as they are equal.
            same = (flat[place[1]][0], place[2], type(value), value)
            if same in shared:
                numbers[shared[same]][0].append(place)
                return shared[same]
            shared[same] = len(carriers)
        dtype = torch.float64 if isinstance(value, float) else torch.int64
        carrier: Any = mode.from_tensor(torch.tensor(value, dtype=dtype))
        source = ConstantSource(f"n{len(carriers)}")
        symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = env.create_symfloatnode if isinstance(value, float) else env.create_symintnode
        carrier.item_memo = make(symbol, hint=value, source=source)
        carriers.append(carrier)
        numbers.append(([place], part))
        symbols.append(symbol)
        return len(carriers) - 1

    def encode(value: Any, place: Place) -> Any:
        if type(value) in (int, float) and (place, None) not in fixed:
            return ("number", number(value, place))
        if type(value) is tuple and any(
            type(v) is float and (place, i) not in fixed for i, v in enumerate(value)
        ):
            parts = [
                ("number", number(v, place, i)) if type(v) is float else ("constant", v)
                for i, v in enumerate(value)
            ]
            return ("tuple", parts)
        if counters and place[0] == "state" and place[2] not in shaped and is_counter(value):
            return ("counter", number(value.item(), place))
        if isinstance(value, torch.Tensor):
            states.append(place)
            state_fakes.append(mode.from_tensor(value.detach()))
            return ("tensor", len(states) - 1)
        constants.append((place, value))
        return ("constant", value)

    groups = [
        {k: encode(v, ("group", gi, k)) for k, v in group.items() if k != "params"}
        for gi, group in enumerate(optimizer.param_groups)
    ]
    entries = [{k: encode(v, ("state", i, k)) for k, v in state.get(i, {}).items()} for i in which]
    with mode:
        params = [
            torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=p.device)
            for p in (flat[i][1] for i in (*which, *others))
        ]
        params, idle = params[: len(which)], params[len(which) :]
        grads = [torch.empty_like(p) for p in params]
    left: list[tuple[Place, Any]] = []
    counted: list[bool] = []
    there = {("state", i, k) for i, code in zip(which, entries, strict=True) for k in code}
    there.update(("group", gi, k) for gi, code in enumerate(groups) for k in code)

    def is_result(place: Place, value: Any) -> bool:
        """What the update leaves: tensors, numbers that it computed, and numbers that are new."""
        if isinstance(value, torch.Tensor | torch.SymInt | torch.SymFloat):
            return True
        return type(value) in (int, float) and place not in there

    def run(params: Any, grads: Any, tensors: Any, carriers: Any, idle: Any) -> Any:
        params = [p.clone() for p in params]
        tensors = [t.clone() for t in tensors]
        values = [c.item() for c in carriers]

        def decode(code: Any) -> Any:
            what, value = code
            if what == "number":
                return values[value]
            if what == "counter":
                return Counter(values[value])
            if what == "tensor":
                return tensors[value]
            return tuple(decode(v) for v in value) if what == "tuple" else value

        twin_groups: list[dict[str, Any]] = []
        for code in groups:
            group = {k: decode(v) for k, v in code.items()}
            group["params"] = Members()
            settle_flavour(group, capturable=not counters)
            twin_groups.append(group)
        for p, g in zip(params, grads, strict=True):
            p.grad = g
        everything = sorted(
            zip((*which, *others), (*params, *idle), strict=True), key=itemgetter(0)
        )
        for i, p in everything:
            footprint.give_attributes(flat[i][1], p)
            twin_groups[flat[i][0]]["params"].append(p)
        held = {
            p: {k: decode(v) for k, v in code.items()}
            for p, code in zip(params, entries, strict=True)
            if code
        }
        twin = footprint.twin(twin_groups, held)
        before = [dict(group) for group in twin_groups]
        earlier = {id(p): dict(values) for p, values in held.items()}
        with torch.no_grad():
            returned = plain_step(optimizer)(twin)
        footprint.check(twin, returned)
        for i, p in everything:
            footprint.check_attributes(flat[i][1], p)
        counted[:] = [True for group in twin_groups if group["params"].counted]
        left.clear()
        for p, i in zip(params, which, strict=True):
            kept = twin.state.get(p, {})
            left.extend((("state", i, k), plain(v)) for k, v in kept.items())
            footprint.check_entries(earlier.get(id(p), {}), kept)
        for gi, group in enumerate(twin_groups):
            footprint.check_entries(before[gi], group)
            left.extend(
                (("group", gi, k), v)
                for k, v in group.items()
                if k != "params" and (k not in before[gi] or _changed(before[gi][k], v))
            )
        return params, [v for place, v in left if is_result(place, v)], idle

    with mode, as_when_compiled(optimizer):
        traced = make_fx(
            torch.func.functionalize(run, remove="mutations_and_views"),
            decomposition_table=without_factors(decompositions),
            _allow_non_fake_inputs=True,
        )(params, grads, state_fakes, carriers, idle)
    footprint.check_graph(traced.graph, len(idle))
    rigid = rigid_numbers(traced.graph, sum((len(params), len(grads), len(states))), numbers)
    if rigid - fixed:
        return _trace(
            footprint, which, state, decompositions, counters=counters, fixed=fixed | rigid
        )
    outs = [(place, v) for place, v in left if is_result(place, v)]
    counts = (len(params), len(grads), len(states), len(carriers))
    pieces = split_host(traced.graph, counts, len(params), outs)
    tensors = {
        str(n.target): getattr(traced, str(n.target))
        for n in traced.graph.find_nodes(op="get_attr")
    }
    together = whole(
        pieces["graph"], tensors, which, states, pieces["scalar_count"], pieces["state_out"]
    )
    return Update(
        optimizer=optimizer,
        which=which,
        calls=(None if counted else split(together, states)) or [together],
        states=states,
        host=pieces["host"],
        numbers=numbers,
        number_out=[[place] for place in pieces["number_out"]],
        scalar_count=pieces["scalar_count"],
        symbols=symbols,
        structure=structure_of(which, state),
        footprint=footprint,
        constants=constants,
        conditions=_conditions(env, symbols),
    )


def _first_line(failure: Exception) -> str:
    return (str(failure).strip().splitlines() or [""])[0][:200]


def _changed(a: Any, b: Any) -> bool:
    return a is not b and isinstance(b, torch.Tensor | torch.SymInt | torch.SymFloat)


def _conditions(env: Any, symbols: list[Any]) -> list[Any]:
    mine = set(symbols)
    found = [g.expr for g in env.guards]
    return list(dict.fromkeys(e for e in found if e.free_symbols and e.free_symbols <= mine))
