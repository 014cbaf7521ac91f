"""Calls in a step that compute nothing for it: they run after its program, with the values that it gives.

print, loggers     deferred as soon as they are met
list.append        deferred as soon as it is met, on an outer list that the step does not read: Dynamo would
                   guard on the list, and trace the step again for each of its lengths
any other call     deferred where it cannot be traced, its result is unused, and it reaches nothing that the step is
                   made of (left_out.py; a progress bar, a writer, a metric): the trace starts over and puts it after
                   the program, where it is watched (untouched.py). Refused with its line otherwise
clip_grad_norm_    is called as it is; what it gives is noted, where somebody watches updates
clocks             give NaN: a step is one program, and no time passes between two of its lines

A deferred call runs once per call of the step, in the order of the lines.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradsync_fx._torch import (
    ConstDictVariable,
    InstructionTranslatorBase,
    LazyVariableTracker,
    LocalGeneratorObjectVariable,
    LoggingLoggerVariable,
    StringFormatVariable,
    SymNodeVariable,
    TensorVariable,
    TupleVariable,
    Unsupported,
    VariableTracker,
    formatted,
    free_unbacked_symbols,
)
from gradsync_fx._torch import format_value as plain_format_value
from gradsync_fx._torch import load_attribute as plain_load_attribute
from gradsync_fx.capture.comparisons import decided
from gradsync_fx.capture.drawn_numbers import drawn
from gradsync_fx.capture.left_out import Touches, check_helper
from gradsync_fx.capture.names_of_torch import torch_name_of
from gradsync_fx.capture.notes import note_norm
from gradsync_fx.capture.numpy_draws import refuse_numpy_draw
from gradsync_fx.capture.source_names import users_name
from gradsync_fx.capture.trace_state import (
    CallSite,
    Observed,
    const,
    function_of,
    line_of,
    observed,
    real_value,
    refuse,
)
from gradsync_fx.capture.untouched import run_watched


_ASKED = (
    "isEnabledFor",
    "getEffectiveLevel",
    "hasHandlers",
)  # of a logger, and answered while tracing
_CLOCKS = frozenset(
    getattr(time, name + unit)
    for name in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
    for unit in ("", "_ns")
)


def run_deferred(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], watched: str = ""
) -> None:
    """One deferred call, made by Dynamo's code after the program. watched: its name and line, where it is watched."""
    if watched:
        run_watched(function, args, kwargs, watched)
    else:
        function(*args, **kwargs)


class _Ours(VariableTracker):
    """A variable for a function of this package, by its module and name, for Dynamo's code."""

    def __init__(self, name: str, module: str = __name__, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.name, self.module = name, module

    def reconstruct(self, codegen: Any) -> None:
        codegen.load_import_from(self.module, self.name)


def call_after_program(tx: Any, function: Any, arguments: list[Any]) -> None:
    """Has Dynamo's code call a function of this package after the program."""
    ours = _Ours(function.__name__, function.__module__)
    tx.output.root_tx.debug_locals.append((ours, arguments))


def put_after_program(
    tx: Any, function: Any, args: Any, kwargs: Any, name: str, *, watched: bool = False
) -> Any:
    """Has Dynamo's code call `function` after the program, with detached arguments."""
    where = f"{name} at {line_of(tx)}"
    given = [_detached(tx, a) for a in args]
    named = {const(key): _detached(tx, value) for key, value in kwargs.items()}
    call = [function, TupleVariable(given), ConstDictVariable(named)]
    if watched:
        call.append(const(where))
    call_after_program(tx, run_deferred, call)
    observed().in_graph(tx.output).moved.append(f"{where}: after the program")
    return const(None)


def log_to(logger: str, method: str, *args: Any, **kwargs: Any) -> None:
    """Calls a logger that the step looked up by its name."""
    getattr(logging.getLogger(logger), method)(*args, **kwargs)


def give(tensor: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Accumulates a gradient into `.grad`, as `backward` does for a leaf; None where the step dropped it."""
    if gradient is None or tensor.grad is None:
        tensor.grad = gradient
    else:
        tensor.grad.add_(gradient)


def give_after_program(tx: Any, tensor: Any, gradient: Any) -> None:
    """Has an input's own gradient accumulated into its `.grad` after the program."""
    call_after_program(tx, give, [tensor, gradient])


def _detached(tx: Any, value: Any) -> Any:
    value = value.realize()
    if isinstance(value, TensorVariable):
        return value.call_method(tx, "detach", [], {})
    if isinstance(value, StringFormatVariable):
        positional = [_detached(tx, v) for v in value.sym_args]
        named = {key: _detached(tx, v) for key, v in value.sym_kwargs.items()}
        return formatted(tx, value.format_string, positional, named)
    return value


def debugging_call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
    """`DebuggingVariable.call_function` while a step is traced: print."""
    return put_after_program(tx, self, args, kwargs, self.value.__name__)


class _Method(VariableTracker):
    """A method of an object from outside of the step; its calls are deferred."""

    def __init__(self, owner: Any, name: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owner, self.name = owner, name

    def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
        return put_after_program(tx, self, args, kwargs, f"{_path(self.owner)}.{self.name}")

    def reconstruct(self, codegen: Any) -> None:
        codegen(self.owner.source)
        codegen.extend_output(codegen.create_load_attrs(self.name))


def logger_call(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
    """`LoggingLoggerVariable.call_method` while a step is traced."""
    if name in _ASKED:
        return const(getattr(self.value, name)(*(a.as_python_constant() for a in args)))
    if self.source is None:
        given = [const(self.value.name), const(name), *args]
        return put_after_program(tx, _Ours(log_to.__name__), given, kwargs, f"logger.{name}")
    return put_after_program(tx, _Method(self, name), args, kwargs, f"logger.{name}")


def load_traced(self: Any, name: str) -> None:
    """`InstructionTranslatorBase._load_attr` while a step is traced."""
    owner, seen = self.stack[-1], observed()
    text = torch_name_of(owner, name)
    if text is not None:
        self.pop()
        self.push(const(text))
        return
    unseen = isinstance(owner, LazyVariableTracker) and not owner.is_realized()
    items = owner.peek_value() if unseen and name == "append" else None
    if isinstance(items, list | deque) and id(items) not in seen.read_lists:
        seen.in_graph(self.output).appended.append(items)
        self.pop()
        self.push(_Method(owner, name))
        return
    plain_load_attribute(self, name)


def format_traced(self: Any, spec: Any, flags: int) -> None:
    """`InstructionTranslatorBase._format_value` while a step is traced: a number of the program stays one."""
    value = self.stack[-1]
    if isinstance(value, SymNodeVariable) and free_unbacked_symbols(value.sym_num):
        text = "{:" + spec.as_python_constant() + "}"
        self.push(formatted(self, text, [self.pop()], {}))
        return
    plain_format_value(self, spec, flags)


def _lists_read(seen: Observed) -> frozenset[int]:
    """Lists (by id) whose appends were deferred, and that the trace also met elsewhere in the step."""
    met = seen.graph.side_effects.id_to_variable if seen.appended else {}
    return frozenset(id(items) for items in seen.appended if id(items) in met)


def check_appended(tx: Any) -> None:
    """Ends the trace when the step also reads a list that it appends to; the next trace treats it as any other."""
    if _lists_read(observed()):
        refuse(tx, "a list of the step", seen="it is appended to, and read")


def call_function(self: Any, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """`InstructionTranslatorBase.call_function` while a step is traced: every call of the step passes here."""
    seen, fn = observed(), fn.realize()
    clock: Any = getattr(fn, "value", None)
    if getattr(clock, "__module__", None) == "time" and clock in _CLOCKS:
        seen.in_graph(self.output).moved.append(
            f"time.{clock.__name__} at {line_of(self)}: NaN, as the step is one program; take the time around it"
        )
        self.push(const(float("nan")))
        return
    if getattr(fn, "fn", None) is logging.getLogger:
        name = [a.as_python_constant() for a in (*args, *kwargs.values())]
        self.push(LoggingLoggerVariable(logging.getLogger(*name)))
        return
    number = drawn(self, fn, args, kwargs)
    if number is not None:
        self.push(number)
        return
    site = (self.f_code, self.current_instruction.offset)
    if site in seen.after_program:
        self.push(put_after_program(self, fn, args, kwargs, _name(fn), watched=True))
        return
    refuse_numpy_draw(self, fn)
    answered = seen.answered
    try:
        _plain_call(self, fn, args, kwargs)
        self.push(decided(self.pop()))
        if getattr(fn, "fn", None) is nn.utils.clip_grad_norm_:
            note_norm(self, self.stack[-1])
    except Exception as failure:
        seen.read_lists |= _lists_read(seen)
        # The outermost such call is deferred last, and so wins: a part of a progress bar's update is not enough.
        # Dynamo warns of calls that it does not know, too; where warnings are errors, that is what stops it.
        stopped = isinstance(failure, Unsupported | Warning) and seen.answered == answered
        if stopped and result_unused(self):
            _defer(self, site, fn, args, kwargs)
        raise


_plain_call = InstructionTranslatorBase.call_function


def result_unused(tx: Any) -> bool:
    """Whether the code that is being traced drops the result of the call that it makes."""
    return bool(tx.instructions[tx.instruction_pointer].opname == "POP_TOP")


def _defer(tx: Any, site: CallSite, fn: Any, args: list[Any], kwargs: dict[str, Any]) -> None:
    """Has the next trace put this call after the program, or refuses it for what it may touch."""
    seen = observed()
    function = function_of(fn)
    if getattr(function, "__module__", "") == dist.distributed_c10d.__name__:
        if function is dist.barrier:  # a broadcast, say: what it writes is read in the step
            seen.could_wait = site
        return
    if function is None or fn.source is None:
        return
    given: list[Any] = []
    differentiable: list[Any] = []

    def look(value: Any) -> None:
        made_here = isinstance(value, TensorVariable) and value.source is None
        if made_here and value.requires_grad or isinstance(value, LocalGeneratorObjectVariable):
            differentiable.append(value)
        elif not made_here:
            given.append(real_value(tx, value))

    VariableTracker.visit(look, [args, kwargs])
    trained = {id(leaf) for leaf in seen.leaves}
    try:
        check_helper(
            function,
            given,
            differentiable=bool(differentiable),
            trained=lambda tensor: id(tensor) in trained,
        )
    except Touches as reason:
        if seen.could_wait is None and seen.refusal is None:
            refuse(
                tx,
                _name(fn),
                seen=f"it cannot be traced, and nobody uses its result; {reason}, so that it cannot wait until the "
                "step's program has run",
                wanted="calls that can be traced, or that touch no gradient, parameter, buffer, optimizer, input or "
                "random generator",
                fix="write it so that it can be traced (torch's functions, no numbers of Python), call it outside of "
                'the step (where step.sync_gradients is True, for once per update), or pass on_unsupported="eager"',
            )
    else:
        seen.could_wait = site


def _name(fn: Any) -> str:
    function = getattr(fn, "fn", None) or getattr(fn, "value", None)
    name = getattr(function, "__qualname__", None) or getattr(fn, "name", None)
    return name if isinstance(name, str) else _path(fn)


def _path(value: Any) -> str:
    """What the user calls a value."""
    return getattr(value.source, "freevar_name", None) or users_name(
        value.source.name, observed().function
    )
