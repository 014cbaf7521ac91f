"""Dynamo's variables for the random numbers that a step draws on the host (draws.py)."""

from __future__ import annotations

import ctypes
import math
import operator
import random
from collections.abc import Collection
from typing import Any, NoReturn

import torch
from torch import nn

from gradsync_fx._torch import (
    ConstantVariable,
    DictGetItemSource,
    GetItemSource,
    GlobalSource,
    GuardBuilder,
    RandomClassVariable,
    RandomVariable,
    SymNodeVariable,
    VariableTracker,
    install_guard,
    note_constant_number,
)
from gradsync_fx.capture.draws import DRAWN, NUMBERS, OF_TORCH, Draw
from gradsync_fx.capture.trace_state import Observed, call, const, line_of, observed, refuse


_GLOBAL = "gradsync_fx_drawn"  # what guards find the numbers by, among the globals of the frame
WAYS = 64  # programs that the branches on one step's draws may lead to
_ONE_ELEMENT: tuple[Any, ...] = ([], (), [1], (1,), 1)  # sizes
_BELOW_ONE = 1 - 2.0**-53
_EXACT = 2**24  # integers are themselves in float32
_SEQUENCES = (list, tuple, str, range, nn.ModuleList, nn.Sequential)
_COMPARISONS = {f"__{name}__": getattr(operator, name) for name in ("lt", "le", "gt", "ge")}


def drawn(tx: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """The variable for what a call draws; None where it draws nothing on the host."""
    if isinstance(fn, RandomClassVariable) and not args:
        _refuse_unseeded(tx)
    # Not by `getattr`: of some variables the name is a property, which asks for a constant.
    function = vars(fn).get("value")
    if isinstance(function, type(torch.rand)) and function in OF_TORCH:
        return _of_torch(tx, function, args, kwargs)
    method = _method(tx, fn) or function
    if not isinstance(getattr(method, "__self__", None), random.Random):
        return None
    return _of_python(tx, method, args, kwargs)


def _method(tx: Any, fn: Any) -> Any:
    """A method of a generator that the user made; None for all else, and for one that the step itself made or seeded.

    Dynamo takes copies, with their states as constants: right for a generator whose seed is one.
    """
    owner, name, effects = vars(fn).get("obj"), vars(fn).get("name"), tx.output.side_effects
    if not isinstance(owner, RandomVariable) or owner.source is None:
        return None
    if effects.is_modified(owner):
        return None
    held = effects.id_to_variable
    generator = next(v for v in effects.keepalive if held.get(id(v)) is owner)
    install_guard(owner.source.make_guard(GuardBuilder.ID_MATCH))
    return getattr(generator, name)


def _of_python(tx: Any, method: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    name = method.__name__
    if name == "choice" and len(args) == 1 and issubclass(args[0].python_type(), _SEQUENCES):
        items = call(tx, list, args[0]).unpack_var_sequence(tx)
        return items[_as_constant(_number(tx, Draw(method, (range(len(items)),))))]
    constant = all(v.is_python_constant() for v in (*args, *kwargs.values()))
    if name in NUMBERS - {"choice"} and constant:
        given = tuple(a.as_python_constant() for a in args)
        named = tuple((key, value.as_python_constant()) for key, value in kwargs.items())
        return _number(tx, Draw(method, given, named))
    if name == "seed" and constant:
        return None  # what follows it is constant, too
    refuse(
        tx,
        f"random.{name}",
        seen="it uses a generator on the host, which a program cannot do: what it gives would become a constant"
        if constant
        else "its arguments are known only while the step runs, and its number is drawn before that",
        wanted="random numbers whose arguments are constants, one for each call: random.random(), rng.randint(1, 6), "
        "random.choice(layers)",
        fix='draw with torch (torch.rand, torch.randperm), or ahead of the step; or pass on_unsupported="eager"',
    )


def _as_constant(number: Any) -> int:
    """Its value in this trace, which becomes one of the ways that the step can go."""
    if isinstance(number, SymNodeVariable):
        return int(number.evaluate_expr())
    return int(number.as_python_constant())


def _refuse_unseeded(tx: Any) -> NoReturn:
    refuse(
        tx,
        "random.Random()",
        seen="the step makes a generator without a seed, whose numbers would become constants of the program",
        wanted="a generator that is made once, outside of the step",
        fix="make it before the step is called, or use the functions of the module random",
    )


def _of_torch(tx: Any, function: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    if kwargs or not args or not all(a.is_python_constant() for a in args):
        return None
    *ends, size = (a.as_python_constant() for a in args)
    plain = torch.get_default_dtype() is torch.float32 and torch.get_default_device().type == "cpu"
    if size not in _ONE_ELEMENT or not plain:
        return None
    whole = function is torch.randint
    if len(ends) not in ((1, 2) if whole else (0,)) or whole and size == 1:
        return None
    seen = observed()
    site = (tx.f_code, tx.current_instruction.offset)
    seen.scalar_draws |= {site}
    if site not in seen.on_host:
        return None
    return _DrawnScalar(_number(tx, Draw(function, (*ends, ()))))


def _number(tx: Any, draw: Draw) -> Any:
    seen = observed().in_graph(tx.output)
    seen.drawn.append(draw)
    series, index = seen.host_draws.place(tuple(seen.drawn))
    value = DRAWN[series][index]
    tx.output.global_scope[_GLOBAL] = DRAWN
    # The same name in each attempt of a trace: torch tells what becomes a constant of the next one by name.
    source = GetItemSource(DictGetItemSource(GlobalSource(_GLOBAL), series), index)
    found = VariableTracker.build(tx, value, source).realize()
    seen.lines[source.name] = line_of(tx)
    if isinstance(value, float) and isinstance(found, ConstantVariable):
        _refuse_constant(draw, seen.lines[source.name])
    if draw.below_one and isinstance(found, SymNodeVariable):
        # A layer that is dropped with probability 0 is no branch.
        env = tx.output.shape_env
        env.constrain_symbol_range(found.sym_num.node.expr, 0.0, _BELOW_ONE)
    return found


class _DrawnScalar(VariableTracker):
    """What `torch.rand([])` gave: to be compared with numbers, which become float32 for it, as in torch."""

    def __init__(self, number: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number = number

    def python_type(self) -> type:
        return torch.Tensor

    def richcompare_impl(self, tx: Any, other: Any, op: str) -> Any:
        limit = other.as_python_constant() if other.is_python_constant() else None
        if op not in _COMPARISONS or not isinstance(limit, int | float) or abs(limit) > _EXACT:
            return const(NotImplemented)
        return call(tx, _COMPARISONS[op], self.number, const(ctypes.c_float(limit).value))

    def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "item" and not args:
            return self.number
        return super().call_method(tx, name, args, kwargs)


def is_drawn(source: str) -> bool:
    """Whether this is Dynamo's name for a number that the step draws."""
    return source.startswith(f"G['{_GLOBAL}'][")


def asks_for_a_number(failure: BaseException) -> bool:
    """Whether a trace ended because a tensor's value decides what comes next."""
    return "data-dependent" in str(failure).lower()


def check_draws(seen: Observed, env: Any, given: Collection[str]) -> None:
    """Refuses a step whose branches on draws can come out in too many ways: each would be traced and compiled.

    env: of the trace, at the end of Dynamo's part. given: the sources of its graph's inputs.
    """
    if env is None or not seen.drawn:
        return
    for symbol, sources in env.var_to_sources.items():
        names = [s.name for s in sources if is_drawn(s.name)]
        if names and not any(name in one for name in names for one in given):
            # Only branches ask for it: torch would begin the trace anew, to find it a constant of the graph.
            note_constant_number(str(symbol))
    asked: dict[str, int] = {}
    for guard in env.guards:
        for symbol in guard.expr.free_symbols:
            names = [s.name for s in env.var_to_sources.get(symbol, ()) if is_drawn(s.name)]
            for name in names:
                draw, equals = _draw_of(seen, name), guard.expr.is_Equality
                if equals and not symbol.is_integer:
                    _refuse_constant(draw, seen.lines[name])
                asked[name] = max(asked.get(name, 2), draw.outcomes if equals else 2)
    ways = math.prod(asked.values())
    if ways > WAYS:
        refuse(
            None,
            "branches on random numbers",
            where=seen.lines[min(asked)],
            seen=f"the step asks for {len(asked)} of them, which can come out in {ways} ways at least",
            wanted=f"at most {WAYS} ways, as each becomes a program of its own",
            fix='let one draw decide for several layers, or pass on_unsupported="eager"',
        )


def _draw_of(seen: Observed, name: str) -> Draw:
    return seen.drawn[int(name.rpartition("[")[2].rstrip("]"))]


def _refuse_constant(draw: Draw, line: str) -> NoReturn:
    refuse(
        None,
        draw.name,
        where=line,
        seen="the number that it draws would become a constant of the program, which no other call could use",
        wanted="random numbers that tensors are computed with, or that branches ask for",
        fix='compute with it by tensors only (a factor, a term), or pass on_unsupported="eager"',
    )
