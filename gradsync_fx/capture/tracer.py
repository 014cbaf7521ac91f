"""The tracer: turns a call of the user's step into a `Step`, by Dynamo (whole) and AOTAutograd (functional ATen).

function + arguments -> Dynamo (patches.py at the special calls) -> AOT -> Step, with a name for every input

Dynamo keeps its part at run time too: it guards on what the step depends on, binds the arguments, and rebuilds what
the step returns. A call that its guards do not cover is captured anew.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx._torch import (
    FakeTensorMode,
    cached_backends,
    detect_fake_mode,
    dynamo_optimize,
    reset_code,
    tree_map_only,
)
from gradsync_fx.capture.canonicalize import canonicalize
from gradsync_fx.capture.checkpointing import refuse_reentrant, rematerialize
from gradsync_fx.capture.counts import FollowedNumber
from gradsync_fx.capture.drawn_numbers import check_draws
from gradsync_fx.capture.draws import Draws
from gradsync_fx.capture.explained import ENDS_OF_TRACES, explained
from gradsync_fx.capture.functional import functional
from gradsync_fx.capture.inquiry import Inquiry, Runnable, TracedStep
from gradsync_fx.capture.markers import TRACED, Demand
from gradsync_fx.capture.names import batch_norms, ddp_modules, holders, named_tensors
from gradsync_fx.capture.past_autograd import keep_writes
from gradsync_fx.capture.rebound import output_names, settle_rebound
from gradsync_fx.capture.scoped_converter import ScopedConverter
from gradsync_fx.capture.source_names import users_name
from gradsync_fx.capture.trace_state import (
    Declared,
    HostCall,
    Observed,
    observed,
)
from gradsync_fx.capture.untouched import Around, one_call, runs, runs_now
from gradsync_fx.capture.with_updates import followed
from gradsync_fx.errors import (
    CaptureError,
    ForeignParameterError,
    NoBackwardError,
    NoGradientError,
    NoOptimizerError,
)
from gradsync_fx.ir.ops import LEAF_GRAD, UPDATE, argument
from gradsync_fx.ir.program import Kind, Leaf, Slot, Step, writes
from gradsync_fx.optim.state import parameters_of
from gradsync_fx.wording import name_of


@dataclass(frozen=True, slots=True)
class Capture:
    """A `Step` with the objects that it came from. holders: modules that hold parameters themselves. norms: the numbers
    of what `clip_grad_norm_` gives, among the host's values. draws: what the step draws on the host. name: of the
    user's function."""

    step: Step
    fake_mode: FakeTensorMode | None
    optimizers: tuple[Optimizer, ...]
    ddp: tuple[DistributedDataParallel, ...]
    holders: tuple[nn.Module, ...]
    parameters: dict[str, torch.Tensor]
    buffers: dict[str, torch.Tensor]
    hooked: tuple[str, ...]
    host_calls: tuple[HostCall, ...]
    weighed: bool
    no_syncs: tuple[tuple[str, bool], ...]
    batch_norms: tuple[str, ...]
    moved: tuple[str, ...]
    declared: tuple[Declared, ...]
    numbers: tuple[FollowedNumber, ...]
    never_zeroed: bool
    norms: tuple[int, ...] = ()
    draws: Draws = ()
    name: str = "step"


_serial = itertools.count()
_NO_NOTES = torch.empty(0)  # handed to torch where notes end, by which it knows an output
OnCapture = Callable[[Capture], Callable[[list[Any]], Any]]


def traced(
    function: Callable[..., Any],
    on_capture: Callable[[Capture], Runnable],
    decompositions: Any,
    dynamic: bool | None,
    demand: Demand | None = None,
    *,
    manual: bool = False,
    rank_timeout: float | None = None,
    norms: bool = False,
    at_end: ExitStack | None = None,
) -> TracedStep[Runnable]:
    """A callable that captures `function` as needed and hands each call's flat inputs to what `on_capture` returned.

    at_end: gets callbacks that make Dynamo release what it holds. norms: what clippings give is kept for the host.
    manual: calls that do not reach an optimizer are micro-steps of a window, not mistakes. Raises `CaptureError`
    (naming the user's line) when a step cannot be traced whole.
    """
    asked, inquiry = demand or Demand(), Inquiry(on_capture)

    def whole_step(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        notes = TRACED.end(asked.key, manual)  # type: ignore[func-returns-value]  # a trace answers with its notes
        return tree_map_only(torch.Tensor, torch.Tensor.detach, result), notes

    # Dynamo keeps what it compiled by code object: each step needs one of its own.
    name = name_of(function)
    frame = re.sub(r"\W", "_", f"{name}_{next(_serial)}")
    whole_step.__code__ = whole_step.__code__.replace(co_name=frame)

    def compile_graph(module: GraphModule, inputs: list[Any]) -> Any:
        return _functional(
            module,
            inputs,
            lambda capture: inquiry.on_capture(replace(capture, name=name)),
            decompositions,
            manual,
        )

    context: Any = dynamo_optimize(backend=compile_graph, nopython=True, dynamic=dynamic)
    scoped = ScopedConverter(context.callback._torchdynamo_orig_backend, asked, rank_timeout, norms)
    context.callback._torchdynamo_orig_backend = scoped
    run = context(whole_step)

    def call(*args: Any, **kwargs: Any) -> Any:
        scoped.called = function, args, kwargs
        scoped.draws.foresee()
        try:
            while True:
                try:
                    with one_call():
                        result = run(*args, **kwargs)[0]
                        now = runs()
                        asked.deferred = now.deferred if now is not None else ()
                        return result
                except ENDS_OF_TRACES as failure:
                    # Nothing of the step has run: the trace starts over, with one call more after the program.
                    if not scoped.try_again():
                        raise explained(failure, function) from failure
        finally:
            scoped.called = ()

    if at_end is not None:
        # Dynamo holds what it captured, model and programs with it, by the step's code and by its backend.
        at_end.callback(reset_code, whole_step.__code__)
        at_end.callback(cached_backends.pop, id(compile_graph), None)
    return TracedStep(call, inquiry)


def _functional(
    module: GraphModule,
    inputs: list[Any],
    on_capture: OnCapture,
    decompositions: Any,
    manual: bool,
) -> Any:
    seen, fakes, outputs = observed(), detect_fake_mode(inputs), output_names(module)
    refuse_reentrant(module)
    sources = [
        (n.meta["grapharg"].source.name, n.meta["grapharg"].example)
        for n in module.graph.find_nodes(op="placeholder")
    ]
    check_draws(seen, None if fakes is None else fakes.shape_env, [source for source, _ in sources])

    def receive(graph: GraphModule) -> Any:
        keep_writes(graph, lambda i: users_name(sources[i][0], seen.function))
        rematerialize(graph)
        capture = _capture(graph, sources, outputs, seen, manual)
        ready: list[Callable[[list[Any]], Any]] = []

        def boxed(args: list[Any]) -> Any:
            # On the first call, not here: torch is in the middle of its own tracing, with fake tensors in force.
            if not ready:
                ready.append(on_capture(capture))
            given, args[:] = list(args), []
            if capture.moved or capture.numbers:
                runs_now(Around(capture, list(given)))
            with seen.host_draws.made(capture.draws):
                results = ready[0](given)
            # torch marks the sizes of all outputs once one of them has a symbolic size: the end of the notes, too.
            return [_NO_NOTES if value is None else value for value in results]

        boxed._boxed_call = True  # type: ignore[attr-defined]
        return boxed

    compiled = functional(module, inputs, decompositions, receive)
    return torch.compiler.disable(compiled, reason="a compiled gradsync_fx step")


def _capture(
    graph: GraphModule,
    sources: list[tuple[str, Any]],
    outputs: list[str],
    seen: Observed,
    manual: bool,
) -> Capture:
    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    if len(fakes) != len(sources):
        raise CaptureError(
            "inputs of the step",
            seen=f"tensors: {len(sources)}; inputs that the trace made of them: {len(fakes)}",
            wanted="inputs that are not views of one storage, and no tensor subclasses",
            fix="pass tensors that own their storage (tensor.clone())",
        )
    parameters, buffers = named_tensors(seen)
    names = {id(t): n for n, t in (*buffers.items(), *parameters.items())}
    owned = {id(p) for o in seen.optimizers for p in parameters_of(o)}
    slots = []
    for position, (source, real) in enumerate(sources):
        name = names.get(id(real)) or users_name(source, seen.function)
        if isinstance(real, torch.Tensor) and (
            isinstance(real, nn.Parameter) or id(real) in owned or _is_leaf(real, seen)
        ):
            kind = Kind.PARAMETER
            parameters.setdefault(name, real)
            names[id(real)] = name
        elif any(real is b for b in buffers.values()):
            kind = Kind.BUFFER
        else:
            kind = Kind.DATA
        slots.append(Slot(kind, name, position))
    inputs = {id(t) for t in seen.inputs}
    leaves = {
        i: Leaf(i, names.get(id(t), f"leaf {i}"), t)
        for i, t in enumerate(seen.leaves)
        if id(t) not in inputs
    }
    _unmark(graph, leaves)
    canonicalize(graph)
    step = settle_rebound(Step(graph, tuple(slots), leaves), seen, outputs, sources)
    for slot in (slots[i] for i in step.replaced):
        buffers.pop(slot.name, None)  # another tensor takes its place: each call brings its own
    _check(step, seen, parameters, manual)
    return Capture(
        step=step,
        fake_mode=detect_fake_mode(fakes),
        optimizers=tuple(seen.optimizers),
        ddp=ddp_modules(seen),
        holders=holders(seen),
        parameters=parameters,
        buffers=buffers,
        hooked=tuple(names.get(id(t), "a tensor") for t in seen.hooked),
        host_calls=tuple(seen.host_calls),
        weighed=bool(seen.weights),
        no_syncs=tuple((n.line, not n.late) for n in seen.no_syncs),
        batch_norms=batch_norms(seen),
        moved=tuple(seen.moved),
        declared=tuple(seen.declared),
        numbers=followed(step, seen.numbers, [name for name, _ in sources], seen.function),
        norms=tuple(seen.norms or ()),
        draws=tuple(seen.drawn),
        never_zeroed=seen.left and not (seen.zeroed or seen.assigned or manual),
    )


def _is_leaf(tensor: torch.Tensor, seen: Observed) -> bool:
    """Whether it is a leaf that is trained: inputs have gradients of their own."""
    trained = any(tensor is leaf for leaf in seen.leaves)
    return trained and all(tensor is not given for given in seen.inputs)


def _unmark(graph: GraphModule, leaves: dict[int, Leaf]) -> None:
    """Gradients of inputs are values like any other."""
    for marker in graph.graph.find_nodes(op="call_function", target=LEAF_GRAD):
        if argument(marker, 1) not in leaves:
            marker.replace_all_uses_with(argument(marker, 0))
            graph.graph.erase_node(marker)


def _check(step: Step, seen: Observed, parameters: dict[str, torch.Tensor], manual: bool) -> None:
    if not step.leaves and not seen.backwards:
        raise NoBackwardError(
            "the step",
            seen="it never calls backward: nothing in it has a gradient",
            wanted="a whole training step: forward, backward and optimizer.step()",
            fix="call loss.backward() in the step, before optimizer.step()",
        )
    if not step.leaves:
        raise NoGradientError(
            "the step",
            seen="its backward reaches no parameter",
            wanted="a loss that depends on at least one parameter that requires a gradient",
            fix="check requires_grad, and that the loss is computed by the model",
        )
    known = {id(t) for t in parameters.values()} | {id(t) for t in seen.leaves}
    for optimizer in seen.optimizers:
        for gi, group in enumerate(getattr(optimizer, "param_groups", ())):
            for pi, p in enumerate(group["params"]):
                if id(p) not in known:
                    raise ForeignParameterError(
                        f"parameter {pi} of group {gi} of {type(optimizer).__name__} (shape {tuple(p.shape)})",
                        seen="no module of the step holds it",
                        wanted="an optimizer over the parameters of the model that the step trains",
                        fix="build the optimizer from this model's parameters(), after any change of them",
                    )
    graph = step.module.graph
    written = any(step.slots[i].kind is Kind.PARAMETER for i in _written(step))
    if not graph.find_nodes(op="call_function", target=UPDATE) and not written and not manual:
        if seen.hooked:
            raise hook_error(next(n for n, t in parameters.items() if t is seen.hooked[0]))
        raise no_optimizer_error()


def no_optimizer_error() -> NoOptimizerError:
    """The error for a step that changes no parameter."""
    return NoOptimizerError(
        "the step",
        seen="it never reaches an optimizer: no parameter is changed",
        wanted="a call of optimizer.step() on the parameters that loss.backward() reaches",
        fix="call optimizer.step() in the step on every call, without an `if (i + 1) % k == 0` around it: when it "
        'takes effect is decided for you; or pass gradient_accumulation_steps="manual", where that `if` decides',
    )


def hook_error(name: str) -> CaptureError:
    """The error for a gradient hook on a parameter."""
    return CaptureError(
        f"hook on {name!r}",
        seen="a gradient hook (an optimizer that runs inside backward, perhaps); it does not run in a compiled step",
        wanted="parameters without gradient hooks",
        fix="remove the hook, and do its work between backward() and optimizer.step()",
    )


def _written(step: Step) -> list[int]:
    order = {n: i for i, n in enumerate(step.module.graph.find_nodes(op="placeholder"))}
    return [order[argument(w, 0)] for w in writes(step.module)]
