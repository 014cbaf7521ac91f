"""What Dynamo does at the few calls that make a training step: backward, optimizer step, zeroing, DDP's forward.

While a step is being traced, and only then, these calls leave markers in the graph in place of what torch would trace:

loss.backward()       torch.autograd.grad over the leaves, then one `leaf_grad` marker each; `.grad` starts as None
optimizer.step()      one `update` marker; the optimizer's own code is traced apart (optimizer_trace.py)
zero_grad()           `.grad` becomes None, whatever set_to_none says
ddp(x)                ddp.module(x): the reducer never fires; its duties are taken over by the runtime

Dynamo's variable trackers are patched inside `intercepting()` and restored when it ends, also on errors.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from gradsync_fx import ops
from gradsync_fx._torch import (
    ConstantVariable,
    GradModeVariable,
    GuardBuilder,
    OptimizerVariable,
    TensorVariable,
    TupleVariable,
    UserDefinedObjectVariable,
    VariableTracker,
    dynamo_config,
    install_guard,
)
from gradsync_fx.errors import CaptureError


@dataclass(slots=True)
class Observed:
    """What one trace met: modules in the order of first touch, leaves by number, optimizers by handle."""

    modules: list[tuple[str, nn.Module]] = field(default_factory=list)
    leaves: list[torch.Tensor] = field(default_factory=list)
    optimizers: list[Optimizer] = field(default_factory=list)
    hooked: list[torch.Tensor] = field(default_factory=list)

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

    def saw_module(self, name: str, module: nn.Module) -> None:
        if all(module is not known for _, known in self.modules):
            self.modules.append((name, module))


class _EndOfStep:
    """Its one method, called at the end of the traced function, drops every pending `.grad`."""

    def drop_gradients(self) -> None:
        """Outside of a trace there is nothing to drop."""


END_OF_STEP = _EndOfStep()
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


class _Call(VariableTracker):
    """A bound method whose call is answered by `answer(tx, owner, args, kwargs)`."""

    def __init__(self, owner: Any, answer: Callable[..., Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.answer = owner, answer

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        return self.answer(tx, self.owner, list(args), dict(kwargs))


def _const(value: object) -> Any:
    return ConstantVariable.create(value)


def _is_none(var: Any) -> bool:
    return var is None or (var.is_python_constant() and var.as_python_constant() is None)


def _pending_grad(tx: Any, var: Any) -> Any:
    return tx.output.side_effects.store_attr_mutations.get(var, {}).get("grad")


def _set_grad(tx: Any, var: Any, value: Any) -> None:
    tx.output.side_effects.store_attr(var, "grad", value)


def _tracked(tx: Any, real: torch.Tensor) -> Any:
    return tx.output.side_effects.id_to_variable.get(id(real))


@contextmanager
def _no_grad(tx: Any) -> Iterator[None]:
    mode = GradModeVariable.create(tx, False, initialized=True)
    mode.enter(tx)
    yield
    mode.exit(tx)


def _backward(
    self: Any,
    tx: Any,
    gradient: Any = None,
    retain_graph: Any = None,
    create_graph: Any = None,
    inputs: Any = None,
) -> Any:
    if inputs is not None and not _is_none(inputs):
        wanted = (
            inputs.unpack_var_sequence(tx) if not isinstance(inputs, TensorVariable) else [inputs]
        )
    else:
        wanted = chain(tx.output.leaf_var_creation_order, tx.output.input_source_to_var.values())
    leaves = self._collect_backward_inputs(wanted)
    if not leaves:
        return _const(None)
    real_of = {var: real for real, var in _real_tensors(tx)}
    kwargs = {"allow_unused": _const(True)}
    if retain_graph is not None:
        kwargs["retain_graph"] = retain_graph
    if create_graph is not None:
        kwargs["create_graph"] = create_graph
    args = [self, TupleVariable(leaves)] + ([] if _is_none(gradient) else [gradient])
    grads = VariableTracker.build(tx, torch.autograd.grad).call_function(tx, args, kwargs)
    marker = VariableTracker.build(tx, ops.LEAF_GRAD)
    seen = observed()
    with _no_grad(tx):
        for i, var in enumerate(leaves):
            grad = grads.call_method(tx, "__getitem__", [_const(i)], {})
            if _is_none(grad):
                continue
            before = _pending_grad(tx, var)
            if not _is_none(before):
                grad = before.call_method(tx, "add", [grad], {})
            real = real_of.get(var)
            if isinstance(real, torch.Tensor):
                if real._backward_hooks or getattr(real, "_post_accumulate_grad_hooks", None):
                    seen.hooked.append(real)
                index = _const(seen.leaf_index(real))
                grad = marker.call_function(tx, [grad, index], {})
            _set_grad(tx, var, grad)
    return _const(None)


def _real_tensors(tx: Any) -> Iterator[tuple[torch.Tensor, Any]]:
    effects = tx.output.side_effects
    alive = {id(item): item for item in effects.keepalive}
    for key, var in effects.id_to_variable.items():
        if isinstance(alive.get(key), torch.Tensor):
            yield alive[key], var


def _optimizer_step(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    optimizer: Optimizer = owner.value
    closure: Any = kwargs.get("closure", args[0] if args else None)
    result = _const(None)
    if closure is not None and not _is_none(closure):
        result = closure.call_function(tx, [], {})
    if owner.source is not None:
        install_guard(owner.source.make_guard(GuardBuilder.ID_MATCH))
    which: list[Any] = []
    params: list[Any] = []
    grads: list[Any] = []
    for i, p in enumerate(q for group in optimizer.param_groups for q in group["params"]):
        var = _tracked(tx, p)
        grad = None if var is None else _pending_grad(tx, var)
        if not _is_none(grad):
            which.append(_const(i))
            params.append(var)
            grads.append(grad)
    handle = observed().handle(optimizer)
    if not params:
        return result
    with _no_grad(tx):
        new = VariableTracker.build(tx, ops.UPDATE).call_function(
            tx,
            [_const(handle), TupleVariable(which), TupleVariable(params), TupleVariable(grads)],
            {},
        )
        for i, var in enumerate(params):
            var.call_method(tx, "copy_", [new.call_method(tx, "__getitem__", [_const(i)], {})], {})
    return result


def _drop(tx: Any, parameters: Iterator[torch.Tensor]) -> Any:
    for p in parameters:
        var = _tracked(tx, p)
        if var is not None and not _is_none(_pending_grad(tx, var)):
            _set_grad(tx, var, _const(None))
    return _const(None)


def _optimizer_zero_grad(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return _drop(tx, (p for group in owner.value.param_groups for p in group["params"]))


def _module_zero_grad(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    return _drop(tx, iter(owner.value.parameters()))


def _drop_gradients(tx: Any, owner: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    for attributes in tx.output.side_effects.store_attr_mutations.values():
        attributes.pop("grad", None)
    return _const(None)


def _ddp_forward(self: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    return self.module(*args, **kwargs)


_ANSWERS: list[tuple[type, str, Callable[..., Any]]] = [
    (Optimizer, "step", _optimizer_step),
    (Optimizer, "zero_grad", _optimizer_zero_grad),
    (nn.Module, "zero_grad", _module_zero_grad),
    (_EndOfStep, "drop_gradients", _drop_gradients),
]
_plain_getattr = UserDefinedObjectVariable.var_getattr


def _var_getattr(self: Any, tx: Any, name: str) -> Any:
    value = self.value
    if isinstance(value, nn.Module):
        observed().saw_module(self.source.name if self.source is not None else "", value)
    for owner, attribute, answer in _ANSWERS:
        if name == attribute and isinstance(value, owner):
            return _Call(self, answer)
    return _plain_getattr(self, tx, name)


@contextmanager
def intercepting() -> Iterator[Observed]:
    """Patches Dynamo for one trace; yields what the trace meets. Everything is restored at the end."""
    before = getattr(_current, "value", None)
    _current.value = Observed()
    with ExitStack() as stack:
        stack.callback(setattr, _current, "value", before)
        stack.enter_context(
            dynamo_config.patch(
                trace_autograd_ops=True,
                optimize_ddp=False,
                recompile_limit=max(64, dynamo_config.recompile_limit),
                ignore_logging_functions=_logging_functions(),
            )
        )
        for owner, name, new in (
            (UserDefinedObjectVariable, "var_getattr", _var_getattr),
            (OptimizerVariable, "var_getattr", _var_getattr),
            (TensorVariable, "method_backward", _backward),
            (DistributedDataParallel, "forward", _ddp_forward),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        yield _current.value


def _logging_functions() -> set[Any]:
    """Loggers' methods: dropped from the trace, so that a model's `logger.warning` breaks nothing."""
    import logging

    names = ("debug", "info", "warning", "warning_once", "error", "log")
    found = {getattr(logging.Logger, n, None) for n in names} - {None}
    return set(dynamo_config.ignore_logging_functions) | found
