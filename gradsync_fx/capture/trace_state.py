"""The state of the trace in progress, and helpers for handlers to read and make Dynamo's variables."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.fx import Node
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx._torch import (
    ConstantVariable,
    GlobalSource,
    GradModeVariable,
    TensorVariable,
    TracingContext,
    VariableTracker,
    read_attribute,
)
from gradsync_fx.capture.draws import Draw, HostDraws
from gradsync_fx.errors import CaptureError
from gradsync_fx.user_lines import is_users


CallSite = tuple[CodeType, int]  # code and offset of the instruction that makes the call


@dataclass(frozen=True, slots=True)
class HostCall:
    """A call that the host makes after each update of `optimizer`: a scheduler's step.

    arguments: ("note", index) for a tensor that the program gives, ("number", index) for its value as a number,
    ("constant", value) for any other. keywords: the names of the last of them, where those are not positional.
    """

    owner: Any
    optimizer: Optimizer | None
    arguments: tuple[tuple[str, Any], ...]
    method: str = "step"
    keywords: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Declared:
    """A window length that another library's object in the step was given, and the line that met it."""

    where: str
    steps: int

    def check(self, steps: object) -> None:
        """Raises `CaptureError` where the step's own k is a number, and another one."""
        if isinstance(steps, int) and steps != self.steps:
            raise CaptureError(
                self.where,
                seen=f"gradient_accumulation_steps is {self.steps} there, and {steps} in gradsync_fx.optimize",
                wanted="one window, the step's own",
                fix=f"pass gradient_accumulation_steps={self.steps} to optimize, or leave it out there",
            )


@dataclass(frozen=True, slots=True)
class Number:
    """A Python number that the step changes. source: Dynamo's name for it. settable: whether it is an attribute.

    branched: it is set after the step's last update, and a branch after that depends on it.
    """

    source: str
    line: str
    settable: bool
    branched: bool = False


@dataclass(slots=True)
class NoSync:
    """A `no_sync` of DDP's in the step. before: forwards of DDP modules before it. late: backward, and no forward."""

    line: str
    before: int
    late: bool = False


@dataclass(slots=True)
class Observed:
    """What one trace met: modules in the order of first touch (within_reach: the outermost ones that any branch of the
    step could meet), leaves by number, optimizers by handle.

    demanded: parameters that receive a gradient in any case, and no others do; empty for an ordinary trace.
    after_program: call sites that are deferred, as an earlier trace stopped at them (deferred_calls.py); could_wait:
    where this one stopped. in_place: collectives that write their argument. inputs: leaves that are data of the call.
    read_lists: lists (by id) that are appended to, and read. assigned: gradients that are values, each with its
    version and the line where it went into `.grad`; made_of_gradients: whether a node is made of one. answered: calls
    of handlers. symbols: numbers (by source) that are symbols of the trace from the start; numbers: those that the
    step changes; lines: where each attribute was set.
    zeroed: gradients are dropped somewhere in the step. left: the end finds some. norms: what `clip_grad_norm_` gives,
    by their numbers among the values for the host; None where nobody asks.
    host_draws: the random numbers of the step's host; drawn: those of this trace, in order. scalar_draws: lines that
    draw a tensor of one number; on_host: those whose number is the host's, as a branch asks for it.
    function: the user's step, by which its values are named for people.
    updates: how many the trace has met so far; set_after: how many there were when an attribute was set;
    compared_after: when a comparison of a symbol was decided, at the latest.
    rebound: places that got another tensor (rebound.py); left_to_host: those that the host sets, after the update.
    """

    demanded: tuple[torch.Tensor, ...] = ()
    after_program: frozenset[CallSite] = frozenset()
    read_lists: frozenset[int] = frozenset()
    handlers: Sequence[Any] = ()  # of other libraries' calls; tried before those of torch's
    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    within_reach: list[tuple[str, nn.Module]] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    update_lines: dict[int, str] = field(default_factory=dict)
    hooked: list[torch.Tensor] = field(default_factory=list)
    host_calls: list[HostCall] = field(default_factory=list)
    weights: int = 0
    no_syncs: list[NoSync] = field(default_factory=list)
    declared: list[Declared] = field(default_factory=list)
    forwards: int = 0
    backwards: int = 0
    zeroed: bool = False
    left: bool = False
    variables: dict[int, Any] = field(default_factory=dict)
    chain: Any = None
    graph: Any = None
    refusal: CaptureError | None = None
    moved: list[str] = field(default_factory=list)
    in_place: list[str] = field(default_factory=list)
    inputs: list[torch.Tensor] = field(default_factory=list)
    assigned: list[tuple[Any, int, str]] = field(default_factory=list)
    made_of_gradients: dict[Node, bool] = field(default_factory=dict)
    appended: list[Any] = field(default_factory=list)
    could_wait: CallSite | None = None
    answered: int = 0
    symbols: frozenset[str] = frozenset()
    numbers: list[Number] = field(default_factory=list)
    lines: dict[str, str] = field(default_factory=dict)
    norms: list[int] | None = None
    host_draws: HostDraws = field(default_factory=HostDraws)
    drawn: list[Draw] = field(default_factory=list)
    scalar_draws: frozenset[CallSite] = frozenset()
    function: Callable[..., Any] | None = None
    updates: int = 0
    set_after: dict[str, int] = field(default_factory=dict)
    compared_after: dict[Any, int] = field(default_factory=dict)
    rebound: list[Any] = field(default_factory=list)
    left_to_host: frozenset[str] = frozenset()
    on_host: frozenset[CallSite] = frozenset()

    def leaf_index(self, leaf: torch.Tensor) -> int:
        for i, known in enumerate(self.leaves):
            if known is leaf:
                return i
        self.leaves.append(leaf)
        return len(self.leaves) - 1

    def handle(self, optimizer: Optimizer) -> int:
        for i, known in enumerate(self.optimizers):
            if known is optimizer:
                return i
        self.optimizers.append(optimizer)
        return len(self.optimizers) - 1

    def saw_module(self, name: str, module: nn.Module, variable: Any = None) -> None:
        self.variables[id(module)] = variable
        if all(module is not known for _, known in self.modules):
            self.modules.append((name, module))

    def in_graph(self, graph: Any) -> Observed:
        """Dynamo may start a trace over: what belongs to the graph that it gave up goes."""
        if self.graph is not graph:
            self.graph, self.chain, self.weights, self.forwards = graph, None, 0, 0
            self.backwards, self.zeroed, self.left = 0, False, False
            self.host_calls.clear()
            self.norms = None if self.norms is None else []
            self.no_syncs.clear()
            self.moved.clear()
            self.in_place.clear()
            self.inputs.clear()
            self.assigned.clear()
            self.made_of_gradients.clear()
            self.appended.clear()
            self.declared.clear()
            self.numbers.clear()
            self.drawn.clear()
            self.rebound.clear()
            self.updates = 0
            self.set_after.clear()
            self.compared_after.clear()
        return self

    @property
    def host_values(self) -> int:
        """How many values the host is given so far."""
        taken = (kind != "constant" for call in self.host_calls for kind, _ in call.arguments)
        return sum(taken) + len(self.norms or ())

    def roots(self) -> list[tuple[str, nn.Module]]:
        """The outermost modules."""
        return outermost(self.modules)


def outermost(modules: Iterable[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Those that no other one holds, in the same order."""
    known = list(modules)
    inside = {id(c) for _, m in known for c in m.modules() if c is not m}
    return [(name, m) for name, m in known if id(m) not in inside]


_current = threading.local()


def observed() -> Observed:
    """What the trace in progress has met. Raises `CaptureError` when none is in progress."""
    found: Observed | None = getattr(_current, "value", None)
    if found is None:
        raise CaptureError(
            "backend 'gradsync'",
            seen="a graph that was not traced by gradsync_fx",
            wanted="a whole training step",
            fix="call gradsync_fx.optimize(train_step)",
        )
    return found


@contextmanager
def observing(fresh: Observed) -> Iterator[Observed]:
    """`fresh` for one trace; the one before is back at the end."""
    before = getattr(_current, "value", None)
    _current.value = fresh
    try:
        yield _current.value
    finally:
        _current.value = before


def line_of(tx: Any) -> str:
    """`file:line` of the user's code that is being traced."""
    frame = tx.frame_summary()
    while not is_users(frame.filename) and getattr(tx, "parent", None) is not None:
        tx = tx.parent
        frame = tx.frame_summary()
    return f"{frame.filename}:{frame.lineno}"


def line_here() -> str:
    """The same where no translator is at hand: of the innermost of the user's frames."""
    stack = TracingContext.extract_stack()
    lines = (f"{f.filename}:{f.lineno}" for f in reversed(stack) if is_users(f.filename))
    return next(lines, "")


def refuse(
    tx: Any, culprit: str, *, seen: str, wanted: str = "", fix: str = "", where: str = ""
) -> NoReturn:
    """Ends the trace. Dynamo would hand on the text only: the error itself is kept for whoever began the trace."""
    where = f"{culprit}, at {where or line_of(tx)}"
    observed().refusal = CaptureError(where, seen=seen, wanted=wanted, fix=fix)
    raise CaptureError(where, seen=seen)


def refuse_as(tx: Any, error: CaptureError) -> NoReturn:
    """Ends the trace with the parts of an error that is known."""
    refuse(tx, error.culprit, seen=error.seen, wanted=error.wanted, fix=error.fix)


def call(tx: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Dynamo's variable for the result of a function, the arguments being variables, too."""
    return VariableTracker.build(tx, function).call_function(tx, list(args), kwargs)


def const(value: object) -> Any:
    return ConstantVariable.create(value)


def is_none(var: Any) -> bool:
    return var is None or (var.is_python_constant() and var.as_python_constant() is None)


def pending_grad(tx: Any, var: Any) -> Any:
    return tx.output.side_effects.store_attr_mutations.get(var, {}).get("grad")


def set_grad(tx: Any, var: Any, value: Any) -> None:
    tx.output.side_effects.store_attr(var, "grad", value)


def variable_of(tx: Any, real: torch.Tensor) -> Any:
    """Dynamo's variable for a tensor that it has met, or None."""
    return tx.output.side_effects.id_to_variable.get(id(real))


def real_tensors(tx: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    """The tensors that Dynamo has met, each with its variable."""
    return real_of_variables(tx, torch.Tensor)


def real_of_variables(tx: Any, kinds: Any) -> Iterator[tuple[Any, Any]]:
    """The objects of these classes that Dynamo has met, each with its variable."""
    effects = tx.output.side_effects
    alive = {id(item): item for item in effects.keepalive}
    for key, var in effects.id_to_variable.items():
        if isinstance(alive.get(key), kinds):
            yield alive[key], var


def function_of(variable: Any) -> Any:
    """The function that one of Dynamo's variables stands for, with what it is bound to; None for anything else."""
    function = getattr(variable, "fn", None) or getattr(variable, "value", None)
    owner = getattr(getattr(variable, "obj", None), "value", None)
    if owner is not None and isinstance(function, FunctionType):
        return MethodType(function, owner)
    return function if callable(function) else None


def real_value(tx: Any, variable: Any) -> Any:
    """What one of Dynamo's variables was made from, as far as it holds that; else None."""
    if isinstance(variable, TensorVariable):
        return next((real for real, var in real_tensors(tx) if var is variable), None)
    return function_of(variable) or getattr(variable, "value", None)


def reach(tx: Any, parameter: torch.Tensor) -> Any:
    """Dynamo's variable for a parameter, by way of the modules met when it has not met the parameter itself."""
    known = variable_of(tx, parameter)
    if known is not None:
        return known
    seen = observed()
    for _, root in seen.roots():
        var = seen.variables[id(root)]
        inner: nn.Module = root
        if isinstance(root, DistributedDataParallel):
            inner, var = root.module, read_attribute(var, tx, "module")
        for name, found in inner.named_parameters():
            if found is parameter:
                for part in name.split("."):
                    var = read_attribute(var, tx, part)
                return var.realize()
    if any(p is parameter for _, root in seen.within_reach for p in root.parameters()):
        # Of a module that another branch of the step calls: no name of this branch leads to it.
        name = tx.output.install_global_by_id("gradsync_fx_parameter", parameter)
        return VariableTracker.build(tx, parameter, GlobalSource(name)).realize()
    refuse(
        tx,
        f"a parameter of shape {tuple(parameter.shape)}",
        seen="it received a gradient elsewhere in this window, and no module of this step holds it",
        wanted="one module that holds all parameters of the step's branches",
        fix="pass the whole model to the step, in every branch of it",
    )


@contextmanager
def no_grad(tx: Any) -> Iterator[None]:
    mode = GradModeVariable.create(tx, False, initialized=True)
    mode.enter(tx)
    yield
    mode.exit(tx)


def readable(source: str) -> str:
    """`L['self'].net` -> `net`: a name for people from Dynamo's expression for a value."""
    inner = re.sub(r"^[LG]\b|\b__import_\w+", "", source)
    words = re.findall(r"[A-Za-z_][A-Za-z0-9_]*|\d+", inner)
    return ".".join(w for w in words if w not in ("_modules", "_parameters", "_buffers")) or source
