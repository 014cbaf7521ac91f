"""Patches Dynamo to call the handlers while a step is traced, and at no other time."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

from torch.nn.parallel import DistributedDataParallel

from gradsync_fx._torch import (
    FAKE_TENSOR_LOG,
    FORMATS_NUMBERS,
    READ_ATTRIBUTE,
    CollectiveFunctionRewriteVariable,
    DebuggingVariable,
    InstructionTranslatorBase,
    LoggingLoggerVariable,
    OptimizerVariable,
    SideEffects,
    UserDefinedObjectVariable,
    aot_graphs,
    compare_op_handlers,
    dynamo_builder,
    dynamo_config,
    in_place_of_backward,
    torch_decompositions,
)
from gradsync_fx.capture import counts, deferred_calls, gradient_values, handlers, in_place
from gradsync_fx.capture.comparisons import deciding
from gradsync_fx.capture.float_inputs import keep_floats
from gradsync_fx.capture.trace_state import Observed, observing


CAPTURES = 64  # of one step


@contextmanager
def intercepting(fresh: Observed) -> Iterator[Observed]:
    """Patches Dynamo for one trace, which fills `fresh`. Everything is restored at the end."""
    with ExitStack() as stack:
        seen = stack.enter_context(observing(fresh))
        seen.handlers = _of_libraries()
        stack.enter_context(
            dynamo_config.patch(
                trace_autograd_ops=True,
                optimize_ddp=False,
                recompile_limit=max(CAPTURES, dynamo_config.recompile_limit),
                # `loss.item()` is a number that the program gives.
                capture_scalar_outputs=True,
                reorderable_logging_functions={print},
                # A counter, wherever it is kept, is a number of the step from its second value on.
                allow_unspec_int_on_nn_module=True,
                allow_rnn=True,
            )
        )
        # What the step raises becomes its own error, without torch's log of it.
        log = logging.getLogger(FAKE_TENSOR_LOG)
        stack.enter_context(mock.patch.object(log, "disabled", True))
        stack.enter_context(in_place_of_backward(handlers.backward))
        for owner, name, new in (
            (UserDefinedObjectVariable, READ_ATTRIBUTE, handlers.traced_attribute),
            (OptimizerVariable, READ_ATTRIBUTE, handlers.traced_attribute),
            (DistributedDataParallel, "forward", handlers.ddp_forward),
            (InstructionTranslatorBase, "call_function", deferred_calls.call_function),
            (InstructionTranslatorBase, "_load_attr", deferred_calls.load_traced),
            (dynamo_builder, "is_int_specialization_case", counts.stays_constant),
            (dynamo_builder, "process_automatic_dynamic", counts.automatic_dynamic),
            (aot_graphs, "_apply_tensorify_python_scalars", keep_floats),
            (CollectiveFunctionRewriteVariable, "call_function", in_place.call_collective),
            (SideEffects, "store_attr", gradient_values.store_attr),
            # One kernel for an LSTM on the CPU: in a graph, its backward lacks what its forward keeps.
            (
                torch_decompositions,
                "select_one_layer_lstm_function",
                lambda *args: torch_decompositions.one_layer_lstm,
            ),
            (DebuggingVariable, "call_function", deferred_calls.debugging_call),
            (LoggingLoggerVariable, "call_method", deferred_calls.logger_call),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        stack.enter_context(mock.patch.dict(compare_op_handlers, deciding()))
        if not FORMATS_NUMBERS:
            stack.enter_context(
                mock.patch.object(
                    InstructionTranslatorBase, "_format_value", deferred_calls.format_traced
                )
            )
        yield seen


def _of_libraries() -> handlers.Handlers:
    """The handlers of libraries that the user's program has imported; no library is imported for them."""
    if "accelerate.accelerator" in sys.modules:
        from gradsync_fx.capture import accelerate  # imports the library

        return accelerate.HANDLERS
    return []
