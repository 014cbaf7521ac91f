"""Handlers: what a trace does in place of the calls that make a training step.

loss.backward()         torch.autograd.grad over the leaves, then one `leaf_grad` marker each; `.grad` starts as None
optimizer.step()        one `update` marker; the optimizer's own code is traced apart (trace.py)
zero_grad()             `.grad` becomes None, whatever set_to_none says; the user's own is called as a scheduler is
scheduler.step()        nothing in the graph: the host makes the call after each update
micro_batch_weight(w)   a note of w
GradScaler              refused by name; nothing, where it is not enabled
no_sync()               nothing; remembered for the report
ddp(x)                  ddp.module(x): the reducer never fires; its duties are taken over by the runtime

accelerate.py has those of another library, in a list of the same type.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from gradsync_fx import scaling
from gradsync_fx._torch import (
    READ_ATTRIBUTE,
    GuardBuilder,
    NullContextVariable,
    TensorVariable,
    TorchDynamoException,
    TupleVariable,
    UserDefinedObjectVariable,
    VariableTracker,
    has_hooks,
    install_guard,
    leaves_among,
    read_attribute,
)
from gradsync_fx.capture.counts import keep_numbers
from gradsync_fx.capture.deferred_calls import check_appended, give_after_program, result_unused
from gradsync_fx.capture.gradient_values import check_assigned
from gradsync_fx.capture.in_place import refuse_overwritten
from gradsync_fx.capture.markers import TRACED
from gradsync_fx.capture.notes import as_tensor, note
from gradsync_fx.capture.rebound import keep_rebound
from gradsync_fx.capture.recurrent import refuse_dropout
from gradsync_fx.capture.sparse import refuse_sparse
from gradsync_fx.capture.step_arguments import closure_of, given_text
from gradsync_fx.capture.trace_state import (
    HostCall,
    NoSync,
    call,
    const,
    is_none,
    line_of,
    no_grad,
    observed,
    pending_grad,
    reach,
    real_tensors,
    refuse,
    refuse_as,
    set_grad,
    variable_of,
)
from gradsync_fx.ir import ops
from gradsync_fx.ir.ops import Role
from gradsync_fx.optim import zeroing
from gradsync_fx.optim.opaque import calls_its_closure_once, closure_given
from gradsync_fx.optim.state import in_groups, parameters_of


class AnsweredMethod(VariableTracker):
    """A bound method whose call is answered by `answer(tx, owner, args, kwargs)`."""

    def __init__(self, owner: Any, answer: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.answer = owner, answer

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        observed().answered += 1
        return self.answer(tx, self.owner, list(args), dict(kwargs))


def backward(
    self: Any,
    tx: Any,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: Any = None,
    inputs: Any = None,
) -> Any:
    """`loss.backward()` while a step is traced."""
    if inputs is not None and not is_none(inputs):
        wanted = (
            inputs.unpack_var_sequence(tx) if not isinstance(inputs, TensorVariable) else [inputs]
        )
    else:
        wanted = chain(tx.output.leaf_var_creation_order, tx.output.input_source_to_var.values())
    seen = observed().in_graph(tx.output)
    seen.answered += 1
    for entered in seen.no_syncs:
        entered.late = entered.late or entered.before == seen.forwards
    seen.backwards += 1
    leaves = leaves_among(self, wanted)
    if not self.requires_grad:
        call(tx, torch.autograd.grad, self, TupleVariable([self]))  # raises what torch raises
    if not leaves:
        return const(None)
    refuse_sparse(tx, leaves)
    real_of = {var: real for real, var in real_tensors(tx)}
    kwargs = {"allow_unused": const(True)}
    if retain_graph is not None:
        kwargs["retain_graph"] = retain_graph
    if create_graph is not None:
        kwargs["create_graph"] = create_graph
    args = [self, TupleVariable(leaves)] + ([] if is_none(gradient) else [gradient])
    try:
        grads = call(tx, torch.autograd.grad, *args, **kwargs)
    except TorchDynamoException as failure:
        refuse_overwritten(tx, failure)
        raise
    note(tx, self.call_method(tx, "detach", [], {}), Role.LOSS)
    demanded = {id(parameter): parameter for parameter in observed().demanded}
    with no_grad(tx):
        for i, var in enumerate(leaves):
            grad = grads.call_method(tx, "__getitem__", [const(i)], {})
            real = real_of.get(var)
            left_out = demanded and real is not None and id(real) not in demanded
            if not (is_none(grad) or left_out):
                _add_gradient(tx, var, real, grad)
        for parameter in demanded.values():
            var = reach(tx, parameter)
            if is_none(pending_grad(tx, var)):
                _add_gradient(tx, var, parameter, call(tx, torch.zeros_like, var))
    return const(None)


def _add_gradient(tx: Any, var: Any, real: Any, grad: Any) -> None:
    before = pending_grad(tx, var)
    if not is_none(before):
        grad = before.call_method(tx, "add", [grad], {})
    if isinstance(real, torch.Tensor):
        seen = observed()
        if has_hooks(real):
            seen.hooked.append(real)
        grad = call(tx, ops.LEAF_GRAD, grad, const(seen.leaf_index(real)))
    set_grad(tx, var, grad)


def optimizer_step(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`optimizer.step(...)` while a step is traced."""
    optimizer: Optimizer = owner.value
    closure = closure_of(args, kwargs)
    result = const(None)
    if closure is not None:
        if not calls_its_closure_once(optimizer):
            refuse_as(tx, closure_given(optimizer))
        result = closure.call_function(tx, [], {})
    guard_identity(owner)
    used = closure is None and not result_unused(tx)
    given = given_text(tx, optimizer, args, kwargs, used=used)
    which: list[Any] = []
    params: list[Any] = []
    grads: list[Any] = []
    for i, p in enumerate(parameters_of(optimizer)):
        var = variable_of(tx, p)
        grad = None if var is None else pending_grad(tx, var)
        if not is_none(grad):
            which.append(const(i))
            params.append(var)
            grads.append(grad)
    handle = observed().handle(optimizer)
    observed().update_lines[id(optimizer)] = line_of(tx)
    observed().in_graph(tx.output).updates += 1
    if not params:
        return result
    with no_grad(tx):
        new = call(
            tx,
            ops.UPDATE,
            const(handle),
            TupleVariable(which),
            TupleVariable(params),
            TupleVariable(grads),
            const(given),
        )
        for i, var in enumerate(params):
            var.call_method(tx, "copy_", [new.call_method(tx, "__getitem__", [const(i)], {})], {})
    return result


def _check_groups(tx: Any, optimizer: Optimizer) -> None:
    """Dynamo writes what a step sets in Python after the graph has run, which is too late for the update in it."""
    for number, group in enumerate(getattr(optimizer, "param_groups", ())):
        held = tx.output.side_effects.id_to_variable.get(id(group))
        if held is not None and getattr(held.mutation_type, "is_modified", False):
            refuse(
                tx,
                f"group {number} of {type(optimizer).__name__}",
                where=observed().update_lines[id(optimizer)],
                seen="the step sets one of its hyper-parameters itself, on every call",
                wanted="hyper-parameters that change outside of the step, or by a scheduler",
                fix="set group['lr'] before the call, or use torch.optim.lr_scheduler (its step() may stand in the "
                "step, and runs once for each update)",
            )


def guard_identity(owner: Any) -> None:
    if owner.source is not None:
        install_guard(owner.source.make_guard(GuardBuilder.ID_MATCH))


def zero_grad(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """`zero_grad(...)` of an optimizer or a module while a step is traced."""
    value, optimizer = owner.value, owner.value if isinstance(owner.value, Optimizer) else None
    observed().in_graph(tx.output).zeroed = True
    for p in value.parameters() if optimizer is None else in_groups(optimizer):
        var = variable_of(tx, p)
        if var is not None and not is_none(pending_grad(tx, var)):
            set_grad(tx, var, const(None))
    method = zeroing.method_of(value)
    if not zeroing.is_own(method):
        return const(None)
    why_not = zeroing.why_not_later(value, method)
    if why_not is not None:
        refuse_as(tx, why_not)
    guard_identity(owner)
    return after_update(tx, value, optimizer, args, kwargs, zeroing.NAME)


def _scheduler_step(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    guard_identity(owner)
    return after_update(tx, owner.value, getattr(owner.value, "optimizer", None), args, kwargs)


def after_update(
    tx: Any,
    owner: Any,
    optimizer: Optimizer | None,
    args: list[Any],
    kwargs: dict[str, Any],
    method: str = "step",
) -> Any:
    """A method, `owner.step(...)` say, becomes a call of the host, after each update of `optimizer`."""
    seen = observed().in_graph(tx.output)
    arguments: list[tuple[str, Any]] = []
    taken = seen.host_values
    for value in (*args, *kwargs.values()):
        if value.is_python_constant():
            arguments.append(("constant", value.as_python_constant()))
            continue
        kind = "note" if isinstance(value, TensorVariable) else "number"
        note(tx, as_tensor(tx, value), Role.HOST, taken)
        arguments.append((kind, taken))
        taken += 1
    seen.host_calls.append(HostCall(owner, optimizer, tuple(arguments), method, tuple(kwargs)))
    return const(None)


def _weigh(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    seen = observed().in_graph(tx.output)
    (weight,) = args
    seen.weights += 1
    if seen.weights > 1:
        refuse(
            tx,
            "micro_batch_weight",
            seen="it is called twice in one call of the step",
            wanted="one call, with the weight of the whole micro-batch",
            fix="add the weights up first",
        )
    with no_grad(tx):
        note(tx, as_tensor(tx, weight), Role.WEIGHT)
    return const(None)


def _scaler(name: str) -> Callable[..., Any]:
    def answer(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if owner.value.is_enabled():
            refuse_as(tx, scaling.refused(f"{type(owner.value).__name__}.{name}"))
        if name == "scale":
            return args[0]
        if name == "step":
            return read_attribute(args[0], tx, "step").call_function(tx, args[1:], kwargs)
        return const(None)

    return answer


def no_sync(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    seen = observed().in_graph(tx.output)
    seen.no_syncs.append(NoSync(line_of(tx), seen.forwards))
    return NullContextVariable()


def _end(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Drops what is left in `.grad`; notes it first where calls without an update belong to a window.

    What an input has there is no window's: the input gets it, as from eager PyTorch.
    """
    check_appended(tx)
    check_assigned(tx)
    keep_numbers(tx)
    keep_rebound(tx, after_update, guard_identity)
    for optimizer in observed().optimizers:
        _check_groups(tx, optimizer)
    _, keep = (a.as_python_constant() for a in args)  # the demand becomes a guard by being read
    seen = observed().in_graph(tx.output)
    real_of = {var: real for real, var in real_tensors(tx)}
    owned = {id(p) for o in seen.optimizers for p in parameters_of(o)}
    for var, attributes in list(tx.output.side_effects.store_attr_mutations.items()):
        if "grad" not in attributes:
            continue
        grad, real = attributes.pop("grad"), real_of.get(var)
        seen.left |= isinstance(real, nn.Parameter) and not is_none(grad)
        if not isinstance(real, torch.Tensor):
            continue
        if not isinstance(real, nn.Parameter) and id(real) not in owned and _is_input(var):
            seen.inputs.append(real)
            give_after_program(tx, var, grad)
        elif keep and not is_none(grad):
            note(tx, grad, Role.LEFT, seen.leaf_index(real))
    return const(None) if seen.chain is None else seen.chain


def _is_input(var: Any) -> bool:
    """Whether a tensor is data of the call: an argument, or in one, that the step does not write."""
    given = re.fullmatch(r"L\['(args|kwargs)'\](\[[^\]]*\])*", var.source.name)
    return given is not None and var.proxy.node.meta["example_value"]._version == 0


def ddp_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """`DistributedDataParallel.forward` while a step is traced; what another thread runs meanwhile is no trace."""
    if not torch.compiler.is_dynamo_compiling():
        return _plain_ddp_forward(self, *args, **kwargs)
    return self.module(*args, **kwargs)


_plain_ddp_forward = DistributedDataParallel.forward


@dataclass(frozen=True, slots=True)
class AnsweredAttribute:
    """A handler of an attribute that is read, not called: `of(tx, owner)` gives its value."""

    of: Callable[[Any, Any], Any]


Handlers = list[tuple[type, tuple[str, ...], Callable[..., Any] | AnsweredAttribute]]
_HANDLERS: Handlers = [
    (Optimizer, ("step",), optimizer_step),
    *((owner, (zeroing.NAME,), zero_grad) for owner in (Optimizer, nn.Module)),
    (LRScheduler, ("step",), _scheduler_step),
    (DistributedDataParallel, ("no_sync",), no_sync),
    (type(TRACED), ("weigh",), _weigh),
    (type(TRACED), ("end",), _end),
    *((GradScaler, (name,), _scaler(name)) for name in ("scale", "unscale_", "step", "update")),
]
_plain_attribute: Any = getattr(UserDefinedObjectVariable, READ_ATTRIBUTE)


def traced_attribute(self: Any, tx: Any, name: str) -> Any:
    """`UserDefinedObjectVariable`'s attribute access while a step is traced: returns a handler where there is one."""
    value = self.value
    if isinstance(value, nn.Module):
        observed().saw_module(self.source.name if self.source is not None else "", value, self)
        refuse_dropout(tx, value, name)
        if name == "module" and isinstance(value, DistributedDataParallel):
            observed().in_graph(tx.output).forwards += 1
    for owner, attributes, answer in chain(observed().handlers, _HANDLERS):
        if name in attributes and isinstance(value, owner):
            return (
                answer.of(tx, self)
                if isinstance(answer, AnsweredAttribute)
                else AnsweredMethod(self, answer)
            )
    return _plain_attribute(self, tx, name)
